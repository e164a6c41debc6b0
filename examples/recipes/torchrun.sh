#!/bin/bash
# Trains with torchrun, and ends with 0 when training has ended, with 42 when it is to be started again.
#
#     until bash torchrun.sh; do [ $? -eq 42 ] || exit 1; done
#
# Also the command of a pod: command: ["bash", "torchrun.sh"]

rm -f runs/example.again
torchrun --standalone --nproc-per-node=2 --max-restarts=10 --shutdown-timeout=100 training.py &
pid=$!
# torchrun passes SIGTERM on to its workers, and waits for them.
trap 'kill -TERM $pid; wait $pid' TERM
wait $pid
code=$?
# torchrun ends with 1 when it was asked to leave: training.py has left word if all is saved.
if [ $code -ne 0 ] && [ -e runs/example.again ]; then
    exit 42
fi
exit $code
