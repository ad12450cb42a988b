"""The small C++ module beside the generated code: optimizer updates, index checks, guards on held objects."""

from sidefx_train.compile.native.build import cache_folder, cpu_description, native_module, start_build

__all__ = ["cache_folder", "cpu_description", "native_module", "start_build"]
