"""For people who write a storage or a cluster of their own: the tests that each must pass, and tools for more tests.

`storage_contract` and `cluster_contract` hold the tests. `processes` starts the workers of a cluster's tests, and
`cluster_scenarios` is what each of them does. `faulty` is a storage that fails or dies at a call that you choose, and
`memory_engine` a job whose workers are threads.
"""
