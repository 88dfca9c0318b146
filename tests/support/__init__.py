"""What tests share that is not a test: engine environments and the tiny models that run on them.

Nothing here is imported by the packages that we ship. Standard library only, except where a module
says that it runs inside an engine environment.
"""
