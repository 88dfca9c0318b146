"""vLLM's own tests of the touched area, against the published and against the patched build.

`python -m tests.conformance` gives every upstream test the same result twice or says which it does
not. `results` compares (plain values), `columns` runs, `hub_cache` stands in for the model hub.
"""
