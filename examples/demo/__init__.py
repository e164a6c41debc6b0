"""The demo: a training run that is killed again and again, and ends bit-identical to one that nobody touched.

`train.py` is the part to copy: a training script as a user writes it. `supervise.py` starts it in processes of their
own, kills them, and `verdict.py` holds what came of it against the run that nobody touched.
"""
