# edgeinfer: two commands for a newcomer, `make run` and `make test`; the rest serves them.
# Everything is set up by tools/setup.sh on first use: nothing outside this folder and the build cache is touched.
PROMPT ?= Name three colours.
MODEL  ?= smollm2-135m-instruct
BIN    := .venv/bin
PYTEST := $(BIN)/python -m pytest
# a process for each core, each on its own; ARGS=-n0 is one process for all
BESIDE := -n auto --maxprocesses 4 --dist loadgroup --no-loadscope-reorder
# tests and benchmarks start programs as a user's shell does: from compiled files
unexport PYTHONDONTWRITEBYTECODE

.PHONY: bench-adapters bench-attention bench-replicas bench-importance bench-loops bench-scale cuda clients bench-agents bench-converting bench-drafts bench-gpu bench-memory bench-resume bench-take bench-tui bench-typing screenshots help setup run test check docs clean distclean bench bench-serve fuzz-http leak-http binary bench-binary bench-engine bench-pull

help:            ## these lines
	@grep -hE '^[a-z-]+: .*##|^[a-z-]+:  *##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 18

setup:           ## virtual environment, llama.cpp, CRIU, the models of the tests
	@tools/setup.sh

run: setup       ## the default model: the chat in a terminal, else the answer to PROMPT= on stdout
	@$(BIN)/edgeinfer pull $(MODEL) >&2
	@if [ -t 0 ] && [ -t 1 ]; then exec $(BIN)/edgeinfer chat $(MODEL); \
	 else exec $(BIN)/edgeinfer run $(MODEL) "$(PROMPT)" --timings </dev/null; fi

test: setup      ## the whole test suite
	@tools/setup.sh test
	$(PYTEST) $(BESIDE) $(ARGS)

check: setup     ## ruff, mypy, house style, import-linter, generated docs are current
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tools/style.py
	PYTHONPATH=. $(BIN)/lint-imports --no-cache
	$(BIN)/python tools/docs.py --check

docs: setup      ## write the generated parts of the docs again
	$(BIN)/python tools/docs.py

bench: setup     ## load, prefill and decode rates beside a bare llama_decode loop and llama-bench
	@tools/setup.sh bench
	$(BIN)/python benchmarks/bench.py $(ARGS)

bench-engine: setup ## 1 to 32 streams, shared prefixes, stalls, schemas, both models, beside llama-server; 6 minutes
	@tools/setup.sh bench
	$(BIN)/python benchmarks/bench_engine.py $(ARGS)

bench-resume: setup ## launches of warm models, 135M to 14B-shaped, beside cold starts and llama-server; 30 GB of disk
	@tools/setup.sh bench
	$(BIN)/python benchmarks/bench_resume.py $(ARGS)

bench-take: setup ## a snapshot taken of a busy endpoint: the longest gap of eight streams; 135M and a 7B shape, 15 GB of disk
	@tools/setup.sh bench
	$(BIN)/python benchmarks/bench_take.py $(ARGS)

bench-memory: setup ## what is remembered: conversations in turn, after kill -9, edits, beside llama-server
	@tools/setup.sh bench
	$(BIN)/python benchmarks/bench_memory.py $(ARGS)

bench-agents: setup ## a new session of a coding agent, its preamble at rest: first token; 135M and a 4B shape, half an hour
	@tools/setup.sh bench
	$(BIN)/python benchmarks/bench_agents.py $(ARGS)

bench-pull: setup ## a download over 1 to 16 connections, from a server that limits each and from one that does not
	$(BIN)/python benchmarks/bench_pull.py $(ARGS)

bench-drafts: setup ## what draft tokens gain on code, chat and summaries, by model and drafter
	@tools/setup.sh bench
	$(BIN)/python benchmarks/bench_drafts.py $(ARGS)

bench-loops: setup ## how often small models repeat themselves, by penalty, and what it costs in quality
	@tools/setup.sh bench
	$(BIN)/python benchmarks/bench_loops.py $(ARGS)

bench-attention: setup ## steps behind a long context, with attention of our own and llama.cpp's; 135M and a 4B shape
	@tools/setup.sh bench
	$(BIN)/python benchmarks/bench_attention.py $(ARGS)

bench-adapters: setup ## what LoRA adapters cost, alone and mixed in one batch
	@tools/setup.sh bench
	$(BIN)/python benchmarks/bench_adapters.py $(ARGS)

bench-importance: setup ## what an importance matrix made here keeps of a model, by type
	@tools/setup.sh bench
	$(BIN)/python benchmarks/bench_importance.py $(ARGS)

bench-converting: setup ## a sharded checkpoint to GGUF: time beside a copy, peak memory; 20 GB of disk
	$(BIN)/python benchmarks/bench_converting.py $(ARGS)

bench-gpu: setup ## first token, reading and writing: the CPU against each GPU and split, beside llama-server
	@tools/setup.sh bench
	$(BIN)/python benchmarks/bench_gpu.py $(ARGS)

bench-serve: setup ## the endpoint beside llama-server, 1 to 32 clients, both models; 8 minutes
	@tools/setup.sh bench
	$(BIN)/python benchmarks/bench_serve.py $(ARGS)

bench-tui: setup  ## the chat: first paint and first token, 10,000 lines, what showing costs, the store
	$(BIN)/edgeinfer pull $(MODEL) >&2
	$(BIN)/edgeinfer warm $(MODEL) >&2
	$(BIN)/python benchmarks/bench_tui.py $(ARGS)

bench-typing: setup ## the chat: 300 words typed, read ahead and not; a cold start's memory, handed over
	$(BIN)/edgeinfer pull $(MODEL) >&2
	$(BIN)/edgeinfer warm $(MODEL) >&2
	$(BIN)/python benchmarks/bench_typing.py $(ARGS)

bench-replicas: setup ## what replicas of a model in one endpoint give and cost
	@tools/setup.sh bench
	$(BIN)/python benchmarks/bench_replicas.py $(ARGS)

bench-scale: setup ## Ray Serve from no replica to one, and 1 to 4 replicas, beside llama-server
	@tools/setup.sh bench
	$(BIN)/python benchmarks/bench_scale.py $(ARGS)

screenshots: setup ## the README's pictures of the chat
	$(BIN)/python tools/screenshots.py

clients: setup   ## other people's clients and agents, unmodified, two turns each; their table in the docs
	@tools/setup.sh test
	$(BIN)/python tests/clients/run.py $(ARGS)

fuzz-http: setup ## schemathesis over the OpenAPI document, 5,000 cases and more
	EDGEINFER_FUZZ_EXAMPLES=40 $(PYTEST) tests/http/dialects/test_openapi.py -s $(ARGS)

leak-http: setup ## 10,000 requests against the real model: memory, descriptors and sequences stay flat
	@tools/setup.sh bench
	$(BIN)/python benchmarks/leak_http.py $(ARGS)

binary: setup    ## dist/edgeinfer, one file (MODEL=NAME puts a model inside; ARGS=--without-criu leaves CRIU out)
	$(BIN)/python build/release.py $(if $(filter command line environment,$(origin MODEL)),--model $(MODEL)) $(ARGS)

bench-binary: binary ## stages of a launch of the file beside the virtual environment, the first launch, sizes
	@tools/setup.sh bench
	$(BIN)/python benchmarks/bench_binary.py $(BENCH_ARGS)

cuda: setup      ## dist/backends/libggml-cuda.so with PyPI's CUDA compiler: hours of one core; CUDA_ARCHS=80-virtual half of one
	tools/build_cuda.sh dist/backends

clean:           ## what tools leave behind
	rm -rf work dist bench-out .pytest_cache .mypy_cache .ruff_cache .hypothesis

distclean: clean ## and the virtual environment
	rm -rf .venv
