"""FP8 by rounding what goes into a product; the recipe is only noted."""

import contextlib


class FP8GlobalStateManager:
    recipe = None

    @classmethod
    def is_fp8_enabled(cls):
        return cls.recipe is not None

    @classmethod
    def get_fp8_recipe(cls):
        return cls.recipe


@contextlib.contextmanager
def fp8_autocast(enabled=True, fp8_recipe=None, fp8_group=None):
    before, FP8GlobalStateManager.recipe = FP8GlobalStateManager.recipe, fp8_recipe if enabled else None
    yield
    FP8GlobalStateManager.recipe = before
