"""What a disk gives, and what saving to it costs: measured with holdfast's own ways of writing and reading.

`measure.py` drives the rounds. In each, `disk.py` and `memory.py` find what the machine can do at best, and `trial.py`
saves and restores as a job does. `figures.py` reckons from that what a save of any size costs, `advice.py` how often to
save. All files lie in a directory of their own, which `place.py` makes and removes.
"""
