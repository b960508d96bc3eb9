import pytest

from dist_transformer.config.registry import Registry


def test_names_are_known_before_their_code() -> None:
    """A configuration is validated without importing the modules that implement what it names."""
    registry: Registry = Registry("shape", "round", "square")
    assert "round" in registry
    assert "oval" not in registry
    assert registry.names == ("round", "square")
    assert registry.remedy_for("oval").endswith("or choose one of round, square")
    assert "did you mean square, or is --import" in registry.remedy_for("sqare")


def test_code_is_found_by_its_name() -> None:
    registry: Registry = Registry("shape", "round")

    @registry.register("oval")
    def oval() -> str:
        return "an oval"

    registry.register("round")(lambda: "a circle")
    assert oval() == "an oval"
    assert [registry[name]() for name in registry.names] == ["a circle", "an oval"]


def test_a_name_is_taken_once() -> None:
    registry: Registry = Registry("shape", "round")
    registry.register("round")(min)
    with pytest.raises(ValueError, match="shape 'round' is registered already: choose another name"):
        registry.register("round")(max)
    assert registry["round"] is min
