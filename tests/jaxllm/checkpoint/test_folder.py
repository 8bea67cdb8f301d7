"""Whether a folder is new; `test_hf.py` and `test_peft.py` have the rest."""

import pytest

from jaxllm.checkpoint.folder import check_new


def test_what_a_save_that_was_cut_short_has_left_is_nothing(tmp_path):
    (tmp_path / ".save-x").mkdir()
    check_new(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="is there already; give a new folder$"):
        check_new(tmp_path)
