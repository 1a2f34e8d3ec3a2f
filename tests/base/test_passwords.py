"""Passwords of URLs are masked, also in URLs with mistakes."""

from __future__ import annotations

import string
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.base.text import holds_secret, mask_argument, mask_secrets, mask_url

SECRET = "S3CRETx"
LEAKY = [
    f"postgresql://bob:aa@{SECRET}@h/db",
    f"postgresql://bob:{SECRET}@h:abc/db",
    f"postgresql://bob:{SECRET}",
    f"postgresql://h:{SECRET}/db",
    f"postgresql://bob:a/{SECRET}@h/db",
    f"postgresql://h/db?sslpassword={SECRET}",
    f"postgresql://h/db?user=me@x&password={SECRET}",
    f"postgresql://h/db?password=a&{SECRET}",
    f"postgresql://h/db?password=a&{SECRET}=b",
    f"postgresql://h/db#{SECRET}",
    f"mssql+pyodbc:///?odbc_connect=DRIVER%3Dx%3BPWD%3D{SECRET}",
    f"mssql+pyodbc://h/db;PWD={SECRET}",
    f"sqlite+pysqlcipher://:{SECRET}@/study.db",
    f"sqlite:///study.db?password={SECRET}",
    f"bob:{SECRET}@h/db",
    f"postgresql:/bob:{SECRET}@h/db",
    f"host=h password={SECRET}",
]


@pytest.mark.parametrize("url", LEAKY)
def test_no_secret_is_shown_wherever_it_stands(url):
    assert SECRET not in mask_url(url)


@given(st.text(string.printable, min_size=1), st.sampled_from(["%s", "postgresql://u:%s@h/d"]))
def test_whatever_the_secret_is_made_of_it_is_not_shown(noise, form):
    """Raw as it is, which may make the URL invalid, and quoted as it should be."""
    for secret in (f"{SECRET}{noise}{SECRET}", f"{noise}{SECRET}"):
        for text in (secret, quote(secret, safe=""), quote_plus(secret)):
            for url in (
                form % text if form != "%s" else f"postgresql://h/d?sslpassword={text}",
                f"postgresql://h/d?sslmode=require&password={text}",
                f"mssql+pyodbc:///?odbc_connect=PWD%3D{text}",
            ):
                assert SECRET not in mask_url(url)
                assert holds_secret(url)


@given(st.text(string.ascii_letters + string.digits + "@:/?%&;= ", min_size=4))
def test_a_drivers_words_are_shown_without_the_secret(secret):
    url = f"postgresql://bob:{quote(secret, safe='')}@h/db"
    told = mask_secrets(f"could not connect as bob with {secret} to {url}", url)
    assert secret not in told.replace(mask_url(url), "")
    assert quote(secret, safe="") not in told.replace(mask_url(url), "")


def test_what_is_no_secret_is_shown():
    for url in (
        "postgresql://bob@db.example.org:5432/study?sslmode=require",
        "postgresql://bob@[::1]:5432/study",
        "sqlite:////data/a@b/study.db",
    ):
        assert mask_url(url) == url
        assert not holds_secret(url)


def test_a_password_is_hidden_wherever_an_address_has_it():
    told = mask_url("postgresql://localhost/study?user=me&password=secret&sslmode=require")
    assert "secret" not in told
    assert "sslmode=require" in told


@pytest.mark.parametrize("url", [url for url in LEAKY if "://" in url and "@" in url])
def test_no_argument_of_a_command_shows_a_secret(url):
    for argument in (url, f"--storage={url}", f'data.path=["{url}", "b"]'):
        assert SECRET not in mask_argument(argument)


def test_other_arguments_of_a_command_stay_as_they_are():
    for argument in ("job.toml", "--set", "data.path=s3://bucket/*.csv", "a@b:c", "journal:/a?b"):
        assert mask_argument(argument) == argument
    url = "postgresql://h/db?user=me&password=secret"
    assert mask_argument(f"--storage={url}") == f"--storage={mask_url(url)}"
