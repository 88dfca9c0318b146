"""The soak: random conversations with a real engine that is aborted, squeezed and killed.

`conversations.py` says what is asked, `judge.py` what is right and what has grown,
`__main__.py` runs engines and lets time pass. `make soak` calls it, and `test_soak.py` in CI.
"""
