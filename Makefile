# `make demo` and `make test` do all the set-up by themselves: Python 3.11 or newer, pip and make are enough.
PYTHON ?= python3
BIN := .venv/bin
# Many tests wait for processes of their own: a worker more than the usual two cores keeps these busy.
WORKERS ?= 3
CONSTRAINTS := constraints.txt
# The tests start many hundred processes: none of them is to compile the sources anew.
unexport PYTHONDONTWRITEBYTECODE
# The comparison's peers need large packages, which lie in a place of their own; `make bench PEERS=light` does without.
BENCH_VENV ?= .venv-bench
PEERS ?= all
ifneq ($(and $(filter bench,$(MAKECMDGOALS)),$(filter-out 1 1,$(words $(PEERS)) $(words $(filter all light,$(PEERS))))),)
$(error PEERS is "all" or "light", not "$(PEERS)")
endif
RAY_VENV ?= .venv-ray
FRAMEWORKS_VENV ?= .venv-frameworks
OLDEST_VENV ?= .venv-oldest
DOCS_VENV ?= .venv-docs
DIST_VENV ?= .venv-dist
# Into each of these that this machine has, `make dist` installs the wheel; give others by PYTHONS="/path/to/python ...".
PYTHONS ?= $(shell for minor in 11 12 13; do p=$$(command -v python3.$$minor) && $$p -c '' 2>/dev/null && echo $$p; done; true)
AZURITE := azurite@3.35.0
BOTO3 := boto3==1.44.8
COMPILED := src/holdfast/save/_moves.c src/holdfast/storage/_digesting.c
BENCH_PLACE := $(if $(filter light,$(PEERS)),.venv,$(BENCH_VENV))
CRASH := PYTHONPATH=tests:tests/support $(BIN)/python -m crash
# For instance: make demo DEMO="--part kills --seed 3"; DEMO=--help shows what there is.
DEMO ?=
FAULTS ?=
# For instance: make bench BENCH="--only model --peer holdfast"
BENCH ?=

# `make gpu` takes the Python that has the machine's own torch, and installs nothing. DRY=1 tries the kit on the processor.
GPU_OUT ?= build/gpu
GPU_WHEELS := .gpu-wheels
PYTHON_VERSION ?= 3.12
DRY ?=
# For instance: make gpu GPU="--only tests"; GPU=--help shows what there is.
GPU ?=

.PHONY: demo dist docs test test-objects faults-objects few-faults-objects test-ray test-slurm test-frameworks test-tensorflow test-oldest check crash faults bench bench-objects bench-goodput bench-frameworks gpu gpu-wheels clean

demo: .venv/ready
	PYTHONPATH=examples $(BIN)/python -m demo $(DEMO)

# With OUTCOME=FILE it writes there what has failed; tests/support/second_run.py runs that once more.
test: .venv/ready
	$(BIN)/pytest -n $(WORKERS) --dist worksteal --durations=15 $(if $(OUTCOME),--outcome-to $(OUTCOME))

# Ray is large, and starts slowly: these tests have an environment of their own.
test-ray: $(RAY_VENV)/ready
	$(RAY_VENV)/bin/pytest tests/jobs/test_jobs_ray.py

# Starts a Slurm of four nodes on this machine, and takes about five minutes. Needs root and Debian's packages.
test-slurm: .venv/ready
	@command -v slurmctld munged >/dev/null || { echo "first: apt-get install --no-install-recommends slurm-wlm munge"; exit 2; }
	HOLDFAST_SLURM=1 $(BIN)/pytest tests/examples/test_slurm.py

# Buckets, on real servers that the tests start and stop: S3 (Ceph's gateway, which this installs from Debian's packages, as
# root) and Azure (Azurite, from npm where there is one). Where the environment of the frameworks is there, their entry points, too.
test-objects: .venv/ready
	command -v radosgw ceph-osd >/dev/null || apt-get install -qq --no-install-recommends ceph-mon ceph-osd radosgw ceph-common
	command -v npm >/dev/null && test ! -e .azurite/node_modules && npm install --silent --prefix .azurite $(AZURITE) || true
	test -e .boto3/boto3 || $(BIN)/pip install --quiet --target .boto3 $(BOTO3)
	HOLDFAST_OBJECTS=1 $(BIN)/pytest tests/objects
	$(MAKE) faults-objects FAULTS="$(FEW_FAULTS)"
	test ! -e $(FRAMEWORKS_VENV)/ready || HOLDFAST_OBJECTS=1 $(FRAMEWORKS_VENV)/bin/pytest tests/objects/test_entry_points.py -k framework

# Kills, lost replies, conflicts, races and a server that dies, on that S3 server: takes half an hour.
FEW_FAULTS := --kills 20 --lost 50 --conflicts 50 --server-kills 1 --races 10
faults-objects: .venv/ready
	$(CRASH).bucket $(FAULTS)

# The same in a minute: `.ci/run` has it beside the tests, where the server is installed.
few-faults-objects: .venv/ready
	@if command -v radosgw ceph-osd ceph-mon >/dev/null && [ "$$(id -u)" = 0 ]; then \
		$(MAKE) faults-objects FAULTS="$(FEW_FAULTS)"; \
	else echo "skipped: faults of buckets need root, and Ceph, which make test-objects installs"; fi

# Lightning, transformers, Keras and Flax are large: the tests of their integrations have an environment of their own.
# What the gate leaves out of the tests of Accelerate runs here, too.
test-frameworks: $(FRAMEWORKS_VENV)/ready
	HOLDFAST_LONG=1 $(FRAMEWORKS_VENV)/bin/pytest tests/frameworks -n $(WORKERS) --dist worksteal --durations=15

# TensorFlow as the backend of Keras: the environment of the comparisons has it.
test-tensorflow: $(BENCH_VENV)/ready
	$(BENCH_VENV)/bin/pytest tests/frameworks/test_keras.py tests/frameworks/test_contract.py -k tensorflow -n $(WORKERS) --dist worksteal

# The same with the oldest supported version of each package: about 7 GB, as the oldest torch comes with CUDA only. A test
# of what an old version lacks is skipped, with the reason. The docs and the comparisons are for the newest.
test-oldest: $(OLDEST_VENV)/ready
	$(OLDEST_VENV)/bin/pytest tests tests/frameworks -n $(WORKERS) --dist worksteal --durations=15 \
		--ignore=tests/docs/test_docs.py --ignore=tests/benchmarks/test_gpu_kit.py \
		--ignore=tests/benchmarks/test_benchmarks_workers.py

# The wheel and the sdist, in dist: checked, installed into empty environments, and an example trained, killed and resumed
# there, in the first one the README's program too, with PyTorch. DIST=--light leaves out what needs PyTorch.
# To publish them: HOLDFAST_PROJECT_URL=https://... make dist && .venv-dist/bin/twine upload dist/*
dist: $(DIST_VENV)/ready
	$(DIST_VENV)/bin/python tests/support/distribution.py --python $(PYTHONS) $(DIST)

# The site, in build/site: every warning is an error, and every link and anchor of what was built is followed.
docs: $(DOCS_VENV)/ready
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict --quiet
	$(DOCS_VENV)/bin/pytest tests/site --noconftest

check: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

crash: .venv/ready
	$(CRASH).single --kills 5000
	$(CRASH).joint --rounds 300
	$(CRASH).torch_joint --rounds 100 --way kill
	$(CRASH).epoch_job --kills 300
	$(CRASH).restarts --kills 2000
	$(CRASH).rollbacks --runs 1000 --jobs 50
	HOLDFAST_LONG=1 HOLDFAST_CUTS=20 $(BIN)/pytest tests/cluster/test_partition.py
	HOLDFAST_LONG=1 $(BIN)/pytest $$(grep -rlE 'mark\.long|HOLDFAST_LONG|hypothesis|repeated' tests \
		--include='test_*.py' --exclude-dir=frameworks --exclude-dir=site)
	$(CRASH).memory --rounds 500
	$(CRASH).memory --flips 10000
	$(CRASH).leaving --faults 50

# Simulated jobs, readers and clean-up on a bucket or a disk, in orders that follow from seeds: 100,000 of them take about half
# an hour on two cores. For instance: make faults FAULTS="--seed 7" shows each call of one; FAULTS=--help shows the rest.
faults: .venv/ready
	PYTHONPATH=tests:tests/support $(BIN)/python -m simulation $(FAULTS)

bench: $(BENCH_PLACE)/ready
	$(BENCH_PLACE)/bin/python -m benchmarks $(BENCH)

# Saves and restores in a bucket: in one of yours by BENCH="s3://bucket/prefix", else on Ceph's gateway, as in test-objects.
bench-objects: $(BENCH_PLACE)/ready
	$(BENCH_PLACE)/bin/python -m benchmarks.buckets $(BENCH)

# Training that is killed about every 15 seconds. For a quick look: make bench-goodput BENCH="--scale 0.2 --rounds 1"
bench-goodput: .venv/ready
	$(BIN)/python -m benchmarks.goodput $(BENCH)

# The page of the docs is written by BENCH="--docs docs/internals/benchmarks.md".
bench-frameworks: $(FRAMEWORKS_VENV)/ready
	$(FRAMEWORKS_VENV)/bin/python -m benchmarks.frameworks $(BENCH)

gpu: $(if $(DRY),.venv/ready)
	$(if $(DRY),$(BIN)/python,$(PYTHON)) -m benchmarks.gpu $(if $(DRY),--dry) --out $(GPU_OUT) --wheels $(GPU_WHEELS) $(GPU)

# Where there is a network: what a machine with a GPU and without one may lack, for its version of Python.
gpu-wheels:
	$(PYTHON) -m benchmarks.gpu.wheels $(GPU_WHEELS) $(PYTHON_VERSION)

clean:
	rm -rf .gpu-wheels .azurite .venv .venv-bench .venv-ray .venv-frameworks .venv-oldest .venv-docs .venv-dist build dist src/holdfast.egg-info $(COMPILED:.c=.*.so)

# Made anew when what is to be installed has changed; the stamp is written last, so a half-made one is not taken for whole.
.venv/ready: EXTRAS := torch,dev
$(BENCH_VENV)/ready: EXTRAS := torch,dev,bench
$(RAY_VENV)/ready: EXTRAS := ray,dev
$(FRAMEWORKS_VENV)/ready $(OLDEST_VENV)/ready: EXTRAS := torch,dev,frameworks
$(OLDEST_VENV)/ready: CONSTRAINTS := constraints-oldest.txt
$(DOCS_VENV)/ready: EXTRAS := docs
$(DIST_VENV)/ready: EXTRAS := dist
.venv/ready $(BENCH_VENV)/ready $(RAY_VENV)/ready $(FRAMEWORKS_VENV)/ready $(OLDEST_VENV)/ready $(DOCS_VENV)/ready $(DIST_VENV)/ready: pyproject.toml setup.py constraints.txt constraints-oldest.txt $(COMPILED)
	if [ -e $(@D)/pyvenv.cfg ]; then rm -rf $(@D); fi
	$(PYTHON) -c 'import sys; sys.exit("holdfast needs Python 3.11 or newer, this is " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(@D)
	rm -f $(COMPILED:.c=.*.so)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[$(EXTRAS)]'
	touch $@
