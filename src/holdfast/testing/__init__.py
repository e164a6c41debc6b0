"""Tests for your own storage or cluster: each must pass them.

`storage_contract` and `cluster_contract` contain them. `processes` starts the workers of a cluster's tests, and
`cluster_scenarios` is what each of them does.
"""
