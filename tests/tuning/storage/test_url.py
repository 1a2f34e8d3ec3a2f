"""URLs of databases: no secret of theirs is ever shown, and mistakes in them are told."""

from __future__ import annotations

import string
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import UserError
from slipstream.tuning.storage import database
from slipstream.tuning.storage import url as address

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
    assert SECRET not in address.mask_url(url)
    with pytest.raises(UserError) as error:
        database.open_storage(url).engine.dispose()
    assert SECRET not in str(error.value)
    assert error.value.__cause__ is None


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
                assert SECRET not in address.mask_url(url)
                assert address.holds_secret(url)


@given(st.text(string.ascii_letters + string.digits + "@:/?%&;= ", min_size=4))
def test_a_drivers_words_are_shown_without_the_secret(secret):
    url = f"postgresql://bob:{quote(secret, safe='')}@h/db"
    told = address.mask_secrets(f"could not connect as bob with {secret} to {url}", url)
    assert secret not in told.replace(address.mask_url(url), "")
    assert quote(secret, safe="") not in told.replace(address.mask_url(url), "")


def test_what_is_no_secret_is_shown():
    for url in (
        "postgresql://bob@db.example.org:5432/study?sslmode=require",
        "postgresql://bob@[::1]:5432/study",
        "sqlite:////data/a@b/study.db",
    ):
        assert address.mask_url(url) == url
        assert not address.holds_secret(url)


@pytest.mark.parametrize("url", ["postgresql://bob:pw@h:abc/db", "postgresql://h:5x/db"])
def test_a_port_that_is_no_number_is_a_mistake_of_the_user(url):
    with pytest.raises(UserError, match="with a numeric PORT"):
        address.parse_url(url)


@pytest.mark.parametrize(
    "url",
    [
        "sqlite://",
        "sqlite:///",
        "sqlite:///:memory:",
        "sqlite:///file::memory:?cache=shared&uri=true",
        "sqlite:///file:x?mode=memory&uri=true",
    ],
)
def test_a_database_in_memory_is_refused(url):
    with pytest.raises(UserError, match=r"in memory.*name a file: sqlite:///FILE"):
        address.refuse_in_memory(url)


def test_a_relative_database_is_the_same_from_every_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = address.make_absolute("sqlite:///study.db")
    assert address.parse_url(found).database == str(tmp_path / "study.db")
    assert address.make_absolute(found) == found
    elsewhere = "postgresql://bob@h/db"
    assert address.make_absolute(elsewhere) == elsewhere


def test_the_password_of_the_environment_goes_to_workers_that_do_not_share_it(monkeypatch):
    monkeypatch.setenv("PGPASSWORD", "p@ss")
    assert address.parse_url(address.add_password("postgresql://bob@h/db")).password == "p@ss"
    for url in ("postgresql://bob:own@h/db", "postgresql://h/db?password=own", "sqlite:///a.db"):
        assert address.add_password(url) == url
