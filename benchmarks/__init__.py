"""Compares holdfast with other ways of saving, and with what the machine can do. `python -m benchmarks --help`.

`__main__` goes through the parts (`rounds`, `frozen`, `many_saves`, `small`), which give orders (`contender`,
`messages`) to processes of their own (`worker`). Those know one way of saving each (`peers`), on state and training
loops of one framework each (`state`, `torch_training`, `jax_training`, `tensorflow_training`). What was measured is
kept (`results`), summed up (`summary`, `targets`) and shown (`report`, `picture`).

`several_workers` does the same with jobs of several workers, on a page of its own.

`python -m benchmarks.planning` is apart from that: what is planned for a save by very many workers (`planning_job`) and
by torch's DCP (`planning_dcp`), in one process, and drawn (`planning_picture`).
"""
