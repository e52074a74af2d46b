"""Nothing of these tests phones home, and nothing is downloaded: token counting uses what LlamaIndex ships."""

import os

import pytest

os.environ["TRANSFORMERS_OFFLINE"] = os.environ["HF_HUB_OFFLINE"] = "1"


def pytest_configure(config: pytest.Config) -> None:
    # To find the steps of an agent, workflows ask it for every one of its attributes, pydantic's old ones among them.
    for name in ("__fields__", "__fields_set__", "model_computed_fields", "model_fields"):
        config.addinivalue_line("filterwarnings", f"ignore:.*{name}.*:pydantic.warnings.PydanticDeprecationWarning")
    # Its agents ask in their own steps whether their run is running.
    config.addinivalue_line("filterwarnings", "ignore:is_running called from within a step:DeprecationWarning")
