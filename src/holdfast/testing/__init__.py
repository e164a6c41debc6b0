"""For people who write a storage or a cluster of their own: the tests that each must pass.

`storage_contract` and `cluster_contract` hold them. `processes` starts the workers of a cluster's tests, and
`cluster_scenarios` is what each of them does.
"""
