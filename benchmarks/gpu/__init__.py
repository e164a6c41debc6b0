"""What runs on a machine with a GPU, in one go: `make gpu`. `python -m benchmarks.gpu --help`.

`__main__` needs the standard library alone. It makes ready what the machine lacks (`site`, from what `wheels` has
gathered where there is a network), and goes through the parts (`parts`), the most important first. Each part is a
process (`process`) with a time limit of its own: the tests that are marked `cuda`, the bare limits (`device`), and one
way of saving each on one size of state (`contender`, on `training`; `jax_contender`). What they find is kept as it
comes (`findings`): one JSON file and one table.
"""
