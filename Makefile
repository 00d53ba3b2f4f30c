# The four commands. `make demo` and `make test` need Debian, root or sudo, and a Rust toolchain, nothing else.
.DEFAULT_GOAL := help
.PHONY: help demo test bench lint payloads

help:
	@echo "make demo    sets up, boots Debian under the monitor and runs disk and network traffic in it"
	@echo "make test    sets up and passes all tests (unit, property, lab scenarios)"
	@echo "make bench   benchmarks against peers, natively; leaves target/bench/*.json"
	@echo "make payloads  builds the payload programs (target/payload)"
	@echo "make lint    format, clippy, layers, duplicate rust-vmm crates, licences, text, commit messages"

demo:
	@tools/setup demo
	@tools/demo

test:
	@tools/setup test
	@tools/test

bench:
	@tools/setup bench
	@cargo run --release --locked -q -p bench

lint:
	@tools/setup lint
	@tools/lint

payloads:
	@$(MAKE) -C guest/payload
