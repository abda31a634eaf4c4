"""For all unit tests: examples may take their time, and what was imported is no garbage.

vLLM's modules come with 700,000 objects. Looking through them again and again takes a fifth of the import, and a third
of a second each time that a test or pytest collects garbage.
"""

import gc

from hypothesis import settings

# How long one takes depends on what else the machine does.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")


def pytest_configure() -> None:
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    # Libraries complain about objects that are left at the end.
    gc.unfreeze()
