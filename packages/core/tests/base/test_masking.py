"""What is hidden wherever values are shown: by one rule, from the names under which they stand."""

from __future__ import annotations

import time
from typing import Any

import pytest

from accel_core.base.masking import HIDDEN, masked, masked_words, without_secrets
from accel_core.options.option_sources import CHANNEL, inherited
from accel_core.options.resolution import Option


@pytest.mark.parametrize(
    "name",
    [
        "WANDB_API_KEY",
        "wandb.api_key",
        "apiKey",
        "apikey",
        "hf_token",
        "HF_TOKENS",
        "auth.password",
        "db-passwd",
        "MYSQL_PWD",
        "client_secret",
        "SECRETS_JSON",
        "AWS_SECRET_ACCESS_KEY",
        "SSH_KEY_PATH",
        "SLURM_JWT",
        "GOOGLE_CREDENTIALS",
        "Authorization",
        "session-cookie",
    ],
)
def test_a_text_under_a_name_that_says_so_is_hidden(name: str) -> None:
    assert masked(name, "tell-nobody") == HIDDEN
    assert masked(name, ["tell-nobody", "file"]) == masked(name, {"a": "tell-nobody"}) == HIDDEN


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 512),
        ("num_key_value_heads", "8"),
        ("per_token_loss", True),
        ("api_key", None),
        ("tokenizer", "gpt2"),
        ("author", "ada"),
        ("keyword", "x"),
        ("monkeypatch", "x"),
        ("num_processes", 2),
    ],
)
def test_what_only_sounds_alike_is_shown(name: str, value: Any) -> None:
    assert masked(name, value) == value


def test_numbers_are_hidden_where_a_name_ends_so() -> None:
    assert masked("password", 1234) == masked("db.password", "1234") == masked("api_key", 7) == HIDDEN


def test_secrets_are_hidden_at_every_depth_and_in_addresses() -> None:
    content = {"env": {"WANDB_API_KEY": "tell-nobody", "MODE": "x"}, "proxies": ["http://ada:tell-nobody@proxy:80"]}
    assert without_secrets(content) == {
        "env": {"WANDB_API_KEY": HIDDEN, "MODE": "x"},
        "proxies": [f"http://{HIDDEN}@proxy:80"],
    }


def test_command_lines_are_shown_without_the_values_of_such_options() -> None:
    words = [
        "a.py",
        "--api-key",
        "k1",
        "--token=k2",
        "wandb.api_key=k3",
        "--tokenizer",
        "gpt2",
        "--use-key",
        "--lr",
        "1",
    ]
    shown = "a.py --api-key (hidden) --token=(hidden) wandb.api_key=(hidden) --tokenizer gpt2 --use-key --lr 1"
    assert " ".join(masked_words(words)) == shown


def test_names_are_read_in_linear_time() -> None:
    began = time.perf_counter()
    masked("k" * 1_000_000, "x")
    assert time.perf_counter() - began < 5


def test_a_broken_channel_is_refused_without_what_it_holds() -> None:
    with pytest.raises(ValueError, match="ACCELERATE_CONFIG cannot be read") as caught:
        inherited({CHANNEL: '{"file": {"ACCELERATE_WANDB__API_KEY": ["tell-nobody"'})
    assert "tell-nobody" not in str(caught.value)


def test_what_runs_is_explained_and_recorded_without_secrets() -> None:
    from accel_core import Accelerator

    accelerator = Accelerator(cpu=True)
    options = {**accelerator._parts.options, "wandb.api_key": Option("tell-nobody", "argument")}
    explanation = accelerator._parts._replace(options=options).explain()
    assert "tell-nobody" not in f"{explanation}{explanation.as_dict()}"
    assert HIDDEN in str(explanation)
