"""For all unit tests: what was imported is no garbage.

vLLM's modules come with 700,000 objects. Looking through them again and again takes a fifth of the import, and a third
of a second each time that a test or pytest collects garbage.
"""

import gc


def pytest_configure() -> None:
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    # Libraries complain about objects that are left at the end.
    gc.unfreeze()
