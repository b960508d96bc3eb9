"""The libraries that a model is exported for, by the values of the flags. Needs neither torch nor the libraries."""

from typing import Literal

Target = Literal["hf", "ctranslate2"]
LIBRARIES: dict[Target, str] = {"hf": "transformers", "ctranslate2": "ctranslate2"}
"""Names of the libraries that load an export."""
QUANTIZATIONS = ("int8", "int8_float32", "int8_float16", "int8_bfloat16", "int16", "float16", "bfloat16")
"""Kinds of weights that CTranslate2 can store instead of fp32."""
