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
# Integration tests share this kernel's cgroups, links and tables: one test binary at a time.
TEST_FLAGS ?=

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
	$(CARGO) clippy --locked --quiet --all-targets -- -D warnings -A clippy::unwrap_used -A clippy::expect_used -A clippy::panic

unit: vendor
	$(CARGO) test --locked --quiet --lib --bins --test layers

test: check integration

# Everything that needs root, a real kernel, a registry, a stock containerd, a virtual machine.
integration: vendor
	@tests/setup test
	$(CARGO) build --locked --bins --tests
	tests/run $(TEST_FLAGS)

demo: build
	@tests/setup demo
	images/demo target/coracle

fmt:
	$(CARGO) fmt
