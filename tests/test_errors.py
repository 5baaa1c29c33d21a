"""How errors show what was got."""

import pytest

from microfloat.errors import invalid_value


@pytest.mark.parametrize("said", ["is a file", "holds no weight of a linear layer"])
def test_a_long_path_hides_nothing_behind_it(said):
    text = str(invalid_value("src", f"/models/{'deep/' * 300}model.safetensors, which {said}", "a folder"))
    assert text.startswith("src: got /models/deep/deep/")
    assert f"model.safetensors, which {said}, needed a folder." in text
    assert len(text) < 260


@pytest.mark.parametrize(("got", "shown"), [("x" * 200, "x" * 200), ([1, 2], "[1, 2]")])
def test_what_was_got_is_shown_whole_where_it_is_short(got, shown):
    assert str(invalid_value("value", got, "something else")) == f"value: got {shown}, needed something else."


def test_an_int_that_python_does_not_print_is_shown_by_its_size():
    assert str(invalid_value("value", 1 << 20000, "less")) == "value: got an int of 20001 bits, needed less."
