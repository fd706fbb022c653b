# coracle: what a person types. Two commands do all the set-up on a fresh Debian machine:
#
#   make demo     builds, runs two pods, kills the agent, shows that nothing was lost
#   make test     every test (root; 2 cores: see README for the time)
#
# More: make build | check | bench | soak | fuzz | cross-check | deny | fmt

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help build check lint unit test integration demo bench soak fuzz cross-check deny fmt setup-build

CARGO ?= cargo
TRIPLE = $(shell $(CARGO) -vV 2>/dev/null | sed -n 's/^host: //p')
RELEASE = target/$(TRIPLE)/release/coracle
# Tests are built with failpoints (inert without CORACLE_FAILPOINTS), so that one build serves all
# of them; demo, benchmarks and what is shipped have none.
TESTING = --locked --features failpoints
# make integration TESTS="net kill" runs only those.
TESTS ?=

include vendor/vendor.mk
vendor: setup-build

help:
	@sed -n '2,8s/^# \{0,1\}//p' Makefile

setup-build:
	@tests/setup build

# The static release-profile binary; demo and benchmarks run it.
build: vendor
	$(CARGO) build --release --locked
	@mkdir -p target
	@cp $(RELEASE) target/coracle.new && mv target/coracle.new target/coracle
	@ls -l target/coracle | awk '{print $$5 " bytes: target/coracle"}'

# An answer within a minute: form, lints, layers, everything that needs no root.
check: vendor lint unit

lint: vendor
	$(CARGO) fmt --check
	$(CARGO) clippy --locked --quiet --lib --bins -- -D warnings
	$(CARGO) clippy $(TESTING) --quiet --all-targets -- -D warnings -A clippy::unwrap_used -A clippy::expect_used -A clippy::panic
	$(CARGO) metadata --locked --format-version 1 --manifest-path tests/fuzz/Cargo.toml >/dev/null

unit: vendor
	$(CARGO) test $(TESTING) --quiet --lib --bins --test layers

test: export CORACLE_ALL_WORLDS = 1
test: check integration

# Everything that needs root, a real kernel, a registry, a stock containerd, a virtual machine.
integration: vendor
	@tests/setup test
	$(CARGO) build $(TESTING) --bins --tests
	tests/run $(TESTS)

demo: build
	@tests/setup demo
	images/demo target/coracle

# Type-checks the two foreign release targets (musl, Debian's rustc with its std source, zig as
# their C compiler). The first run compiles std and ring's C: 8 to 15 minutes on 2 cores.
CROSS_TARGETS = aarch64-unknown-linux-musl armv7-unknown-linux-musleabihf
cross-check: vendor
	@tests/setup cross
	@[ -x target/cross/zig/bin/cargo-zigbuild ] || { python3 -m venv target/cross/zig && \
		target/cross/zig/bin/pip install -q ziglang==0.15.2 cargo-zigbuild==0.24.0; }
	@for target in $(CROSS_TARGETS); do \
		PATH=$$PWD/target/cross/zig/bin:$$PATH RUSTC=/usr/bin/rustc RUSTC_BOOTSTRAP=1 CARGO_TARGET_DIR=target/cross/build \
			cargo-zigbuild check --locked --quiet --lib --bins --target $$target -Zbuild-std=std,panic_abort && echo "type-checks: $$target"; \
	done

# A table of min, median and max, beside crun, runc and kube-proxy where they can do the same work.
# The first run builds kube-apiserver and kube-proxy: 5 minutes more.
bench: build
	@tests/setup bench
	tests/cluster/build-control-plane target/cluster etcd kube-apiserver kubectl kube-proxy
	tests/bench/bench target/coracle --json target/bench.json
	cargo test --locked --quiet --test proxy -- --ignored --nocapture cost

# Every parser of outside bytes under libFuzzer, FUZZ_SECONDS each.
FUZZ_SECONDS ?= 60
fuzz: vendor
	@tests/setup fuzz
	tests/fuzz/run $(FUZZ_SECONDS)

# What is random, for hours: kills, power cuts, failpoints, a machine that is reset, hostile bytes.
soak: vendor
	@tests/setup test
	@tests/setup fuzz
	$(CARGO) build --locked --bins --tests
	CORACLE_SOAK=1 CORACLE_KILLS=$${CORACLE_KILLS:-1000} CORACLE_CHURN_SECONDS=300 CORACLE_CHURN_KILLS=50 \
		tests/run kill churn store node_failpoints runtime volumes vm
	tests/fuzz/run 300

# Licences, duplicates, sources; advisories where their database can be reached.
DENY = target/tools/bin/cargo-deny --all-features --exclude-dev --config .cargo/deny.toml check
deny: vendor
	@[ -x target/tools/bin/cargo-deny ] || $(CARGO) install --quiet --locked --root target/tools cargo-deny@0.20.2
	$(DENY) licenses bans sources
	@$(DENY) advisories 2>target/advisories.log || { grep -q 'failed to fetch advisory' target/advisories.log && \
		echo "SKIP: the advisory database cannot be reached from here" || { cat target/advisories.log; exit 1; }; }

fmt:
	$(CARGO) fmt
