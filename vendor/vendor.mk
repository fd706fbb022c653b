# Included by the Makefile. Everything that runs cargo depends on `vendor`.
.PHONY: vendor
vendor:
	@vendor/fetch
