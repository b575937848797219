# edgeinfer: two commands to start with, `make run` and `make test`; the rest serves them.
# Everything is set up by scripts/setup.sh on first use: nothing outside this folder and the build cache is touched.
PROMPT ?= What is photosynthesis?
MODEL  ?= smollm2-135m-instruct
BIN    := .venv/bin
PYTEST := $(BIN)/python -m pytest
# two processes for each core, at most 4; ARGS=-n0 is one process for all
PARALLEL := -n auto --dist loadgroup --no-loadscope-reorder
# tests and benchmarks start programs as a user's shell does: from compiled files
unexport PYTHONDONTWRITEBYTECODE

.PHONY: $(shell sed -n 's/^\([a-z][a-z0-9-]*\):.*/\1/p' $(firstword $(MAKEFILE_LIST)))

help:            ## list the targets
	@grep -hE '^[a-z0-9-]+: .*##|^[a-z0-9-]+:  *##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 18

setup:           ## what a first answer needs: virtual environment, llama.cpp for this processor, CRIU
	@scripts/setup.sh

full:            ## setup, and all CPU variants, the Vulkan backend, the picture encoder, packages of tests and benchmarks
	@scripts/setup.sh full

gpu:             ## what a first answer needs, and the Vulkan backend
	@scripts/setup.sh gpu

run: setup       ## the default model: the chat in a terminal, otherwise the answer to PROMPT= on stdout
	@$(BIN)/edgeinfer pull $(MODEL) >&2
	@if [ -t 0 ] && [ -t 1 ]; then exec $(BIN)/edgeinfer chat $(MODEL); \
	 else exec $(BIN)/edgeinfer run $(MODEL) "$(PROMPT)" --timings </dev/null; fi

test:            ## tests that need only what `make run` builds: about 10 minutes on 2 cores
	@scripts/setup.sh test
	$(PYTEST) $(PARALLEL) --needs none $(ARGS)

test-all:        ## every test: compiles all CPU variants and Vulkan, downloads an arm64 compiler, builds the shipped file; about an hour
	@scripts/setup.sh test-all
	$(PYTEST) $(PARALLEL) $(ARGS)

test-nightly:    ## the tests of generated cases, with CASES=10 times as many as test-all: some hours
	@scripts/setup.sh test-all
	EDGEINFER_FUZZ_EXAMPLES=20 EDGEINFER_FUZZ_FILES=2000 $(PYTEST) $(PARALLEL) --timeout 7200 --cases $(or $(CASES),10) $(ARGS)

test-fast:       ## tests that need no llama.cpp, CRIU, models or other programs: a minute, compiles nothing
	@scripts/setup.sh lint
	PYTHONPATH=. $(PYTEST) $(PARALLEL) --fast -q $(ARGS)

test-arm64:      ## an emulated arm64 machine, 4 and 16 KiB pages: dumps, warm, resumed runs (TESTS="plain warm graphs build file"); no root
	@scripts/setup.sh run
	scripts/arm64/machine.sh $(or $(TESTS),plain warm)

lint:            ## ruff, mypy, style and words, import contracts, generated docs and links: seconds, compiles nothing
	@scripts/setup.sh lint
	@$(MAKE) --no-print-directory -j 2 lint-types lint-text

lint-types:
	$(BIN)/mypy

lint-text:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python scripts/style.py
	$(BIN)/python scripts/plain_english.py
	PYTHONPATH=. $(BIN)/lint-imports --no-cache
	PYTHONPATH=. $(BIN)/python scripts/docs.py --check

check: lint      ## the old name of lint

lock:            ## write requirements/*.txt again from pyproject.toml, with hashes; needs uv
	scripts/lock.sh $(ARGS)

docs:            ## write the generated parts of the docs again
	@scripts/setup.sh lint
	PYTHONPATH=. $(BIN)/python scripts/docs.py

bench-readme:    ## the README's table, all rows next to llama-server in one run; 15 minutes, 9 GB of disk; one row needs root
	@scripts/setup.sh readme
	$(BIN)/python scripts/readme_table.py $(ARGS)

gpu-kit:         ## dist/gpu-kit.tar.gz: checks and figure of layers on the GPU of another machine, without a network there
	@scripts/setup.sh gpu
	scripts/gpu/pack.sh

bench:           ## load, prefill and decode rates compared with a bare llama_decode loop and llama-bench
bench-engine:    ## 1 to 32 streams, shared prefixes, stalls, schemas, both models, compared with llama-server; 6 minutes
bench-resume:    ## launches of warm models, 135M to 14B-shaped, compared with cold starts and llama-server; 30 GB of disk
bench-memory:    ## what is remembered: conversations in turn, after kill -9, edits, compared with llama-server
bench-pictures:  ## questions about a picture: first, next, in a new conversation, after kill -9, compared with llama-server
bench-drafts:    ## what draft tokens gain on code, chat and summaries, by model and drafter
bench-larger:    ## models larger than memory, dense and mixture, disk at 1 GB/s and free, compared with llama-server; as root
bench-matmul:    ## matrix products by type and rows, with kernels of our own and llama.cpp's
bench-attention: ## steps after a long context, with kernels of our own and llama.cpp's; 135M and a 4B shape
bench-invariance: ## greedy texts unbatched, in any batch, with drafts, from the prefix cache, after a restart; perplexity
bench-gpu:       ## first token, reading and writing: the CPU against each GPU and split, compared with llama-server
bench-serve:     ## the endpoint compared with llama-server, 1 to 32 clients, both models; 10 minutes
bench-receipts:  ## checks of receipts compared with generating, 135M and a 4B shape; 1,000 of them, each also changed; 30 minutes
bench-replicas:  ## what replicas of a model in one endpoint give and cost
leak-http:       ## 10,000 requests against the real model: memory, descriptors and sequences stay flat
bench bench-engine bench-resume bench-memory bench-pictures bench-drafts bench-larger bench-matmul bench-attention \
bench-invariance bench-gpu bench-serve bench-receipts bench-replicas leak-http:
	@scripts/setup.sh bench
	$(BIN)/python benchmarks/$(subst -,_,$@).py $(ARGS)

bench-tui: full   ## the chat: first paint and first token, 10,000 lines, what showing costs, the store
	$(BIN)/edgeinfer pull $(MODEL) >&2
	$(BIN)/edgeinfer warm $(MODEL) >&2
	$(BIN)/python benchmarks/bench_tui.py $(ARGS)

screenshots: full  ## the pictures of the chat and of the page
	$(BIN)/python scripts/screenshots.py
	$(BIN)/python scripts/page_screenshots.py

clients: full    ## other people's clients and agents, unmodified, two turns each; their table in the docs
	@scripts/setup.sh test-all
	$(BIN)/python tests/clients/run.py $(ARGS)

fuzz-http: full  ## schemathesis over the OpenAPI document, 5,000 cases and more
	EDGEINFER_FUZZ_EXAMPLES=40 $(PYTEST) tests/server/dialects/test_openapi.py -s $(ARGS)

fuzz-pictures: full  ## 10,000 mutated pictures and as many projectors, each in a process of its own; an hour of two cores
	@scripts/setup.sh test-all
	EDGEINFER_FUZZ_FILES=10000 $(PYTEST) --timeout 0 tests/media/test_fuzzed_pictures.py -s $(ARGS)

binary: full     ## dist/edgeinfer, one file (MODEL=NAME puts a model inside; ARGS=--without-criu leaves CRIU out)
	$(BIN)/python build/release.py $(if $(filter command line environment,$(origin MODEL)),--model $(MODEL)) $(ARGS)

packages: binary ## dist/release: the file, .deb, .rpm, wheel, digests; not signed
	$(BIN)/pip install -q --no-deps --require-hashes -r requirements/release.txt
	rm -f dist/edgeinfer-oci.tar
	SOURCE_DATE_EPOCH=$${SOURCE_DATE_EPOCH:-1577836800} $(BIN)/python build/publish.py

binary-arm64:    ## dist/edgeinfer-aarch64, the same for arm64, on x86-64: cross-compiled and under qemu-user; no root
	@scripts/setup.sh lint
	scripts/arm64/file.sh

reproduce:       ## build all that is published twice, in two folders and (as root) as two users: every byte must be equal
	scripts/reproduce.sh

release:         ## check that this commit is VERSION= and build what is published into dist/; tags nothing
	scripts/release.sh $(VERSION)

bench-binary: binary ## stages of a launch of the file compared with the virtual environment, the first launch, sizes
	@scripts/setup.sh bench
	$(BIN)/python benchmarks/bench_binary.py $(BENCH_ARGS)

cuda:            ## dist/backends/libggml-cuda.so with PyPI's CUDA compiler: hours of one core, once; CUDA_ARCHS=80-virtual half of one
	@scripts/setup.sh lint
	scripts/build_cuda.sh dist/backends

clean:           ## what the targets write
	rm -rf work dist bench-out .pytest_cache .mypy_cache .ruff_cache .hypothesis

distclean: clean ## and the virtual environment
	rm -rf .venv
