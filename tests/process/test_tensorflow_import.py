from __future__ import annotations

from aiorl.process.tensorflow_import import lacks_memory


def test_a_lack_of_memory_is_known_by_what_loaders_say_and_through_errors_of_cleaning_up() -> None:
    mapping = ImportError("lib.so: failed to map segment from shared object")
    cleaning = RuntimeError("unable to start watchdog thread")
    cleaning.__context__ = mapping
    assert all(map(lacks_memory, (mapping, cleaning, MemoryError(), OSError(12, "Cannot allocate memory"))))
    assert not lacks_memory(ImportError("No module named 'tensorflow'"))
