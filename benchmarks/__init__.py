"""Compares holdfast with other ways of saving, and with what the machine can do.

`python -m benchmarks` goes through the parts of `one_process` and `several_workers`; `python -m benchmarks.frameworks`,
`python -m benchmarks.gpu` (`make gpu`), `python -m benchmarks.planning` and `python -m benchmarks.history` measure the
rest. Each has `--help`.

All but the last two use one `harness`: contenders are processes of their own (`contender`, `worker`), which carry out
orders (`messages`) and take turns in rounds (`turns`), with the machine's own limits in the same rounds (`limits`). A
part says what the contenders can do, in a class of `Duties`. What was measured is kept (`results`), summed up
(`summary`) and shown (`tables`, `picture`).

Contenders know one way of saving each (`peers`), on state and training loops of one framework each (`states`).
"""
