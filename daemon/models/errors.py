"""The one error of model files: whatever is wrong with a file, its reader says what and what to do next."""

from __future__ import annotations


class ModelFileError(ValueError):
    """A model file or directory can't be used. The text names the problem and a next step; it is fit for users."""
