"""The checker of types that runs at every call while the tests run (pyproject.toml names it):
beartype, for which an int is a float too."""

from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))  # as PEP 484 and pyright have it
