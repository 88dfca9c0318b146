from hypothesis import settings

# A busy machine is no reason to fail: time is not what these properties are about.
settings.register_profile("connector", deadline=None)
settings.load_profile("connector")
