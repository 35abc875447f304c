"""Import the folders beside catnat/ by bare names, as in ``from lit_modules.vae import ...``."""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType


class _SameModules(MetaPathFinder, Loader):
    """Finds ``folder.name`` as ``catnat.folder.name``, so that every class exists once."""

    def __init__(self, folder: str) -> None:
        self.start = f"{folder}."

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module of catnat, for names below the folder."""
        return spec_from_loader(fullname, self) if fullname.startswith(self.start) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Import the module of catnat."""
        try:
            module = import_module(f"catnat.{spec.name}")
        except ModuleNotFoundError as error:
            if error.name != f"catnat.{spec.name}":  # something that the module imports
                raise
            raise ModuleNotFoundError(f"No module named {spec.name!r}", name=spec.name) from None
        self.own_spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the specification, which the import system has replaced."""
        module.__spec__ = self.own_spec


def use_catnat(folder: str) -> None:
    """Make ``import folder`` and ``import folder.name`` the modules of ``catnat.folder``."""
    sys.meta_path.insert(0, _SameModules(folder))
    sys.modules[folder] = import_module(f"catnat.{folder}")
