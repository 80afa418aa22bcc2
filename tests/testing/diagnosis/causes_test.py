"""The texts of the causes."""

import pytest

from ctl.testing.diagnosis import causes

TEXTS = {
    name: text for name, text in vars(causes).items() if name.isupper() and isinstance(text, str)
}


@pytest.mark.parametrize("name", TEXTS)
def test_each_cause_is_one_or_more_sentences(name):
    text = TEXTS[name]
    assert text.endswith(".")
    assert text[0].isupper() or text[0] == "{"
    assert "  " not in text
    assert "\n" not in text
