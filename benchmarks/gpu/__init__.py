"""The measurements on a machine with a GPU, in one go: `make gpu`. `python -m benchmarks.gpu --help`.

`__main__` needs the standard library alone. It prepares what the machine lacks (`site`, from what `wheels` has gathered
where there is a network) and goes on as `kit`, which runs the parts, the most important first: the tests that are
marked `cuda`, and one way of saving each on one size of state (`duties`, on `training`). Each part is a process of its
own with a time limit. The figures are kept after each order: one JSON file and one table (`page`).
"""
