"""One module per command of ``python -m builder``; :mod:`builder.cli` finds them here.

Commands parse arguments, call the library and print; they hold no decisions.
"""
