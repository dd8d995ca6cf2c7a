"""What stands under everything: the data folder, the embedded PostgreSQL, addresses, the log, translations."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from rehydrate import catalogs, data, dsn, shared_secrets
from rehydrate.logs import WithoutSecrets, without_secrets
from rehydrate.postgres import Embedded, PostgresError
from tests.conftest import FAST_AND_LOOSE, ROOT


class TestDataFolder:
    @pytest.fixture(autouse=True)
    def _own_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("REHYDRATE_DATA", str(tmp_path / "data"))
        for name in ("REHYDRATE_SECRET_KEY", "REHYDRATE_FIELD_KEYS", "DATABASE_URL"):
            monkeypatch.delenv(name)

    def test_secrets_are_made_once_and_kept_private(self) -> None:
        folder = data.prepare()
        first = data.load_secrets()
        assert (folder / "secrets.json").stat().st_mode & 0o777 == 0o600
        data.prepare()
        assert data.load_secrets() == first
        assert len(first.secret_key) >= 50

    def test_before_the_first_start_nothing_is_written(self, tmp_path: Path) -> None:
        assert data.load_secrets() != data.load_secrets()
        assert not (tmp_path / "data").exists()

    def test_the_environment_goes_first(self, monkeypatch: pytest.MonkeyPatch) -> None:
        data.prepare()
        monkeypatch.setenv("REHYDRATE_SECRET_KEY", "given")
        monkeypatch.setenv("REHYDRATE_FIELD_KEYS", "new, old")
        assert data.load_secrets() == data.Secrets("given", ("new", "old"))

    def test_a_newer_folder_is_refused(self, tmp_path: Path) -> None:
        data.prepare()
        (tmp_path / "data" / "VERSION").write_text("2\n")
        with pytest.raises(data.DataFolderError, match="newer version"):
            data.prepare()

    def test_a_folder_that_cannot_be_made(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "file").touch()
        monkeypatch.setenv("REHYDRATE_DATA", str(tmp_path / "file" / "data"))
        with pytest.raises(data.DataFolderError, match="cannot be used: Not a directory"):
            data.prepare()


@pytest.mark.processes
class TestPostgres:
    @pytest.fixture
    def folder(self, open_folder: Path) -> Path:
        return open_folder

    def test_runs_for_as_long_as_somebody_uses_it(self, folder: Path) -> None:
        server = Embedded(folder, settings=FAST_AND_LOOSE)
        with server.in_use():
            with psycopg.connect(server.url()) as connection:
                assert connection.execute("SELECT current_setting('server_encoding')").fetchone() == ("UTF8",)
            with Embedded(folder).in_use():
                assert server.answers()
            assert server.answers()
        assert not server.answers()

    def test_a_path_too_long_for_a_socket(self, folder: Path) -> None:
        deep = folder / ("x" * 100)
        deep.mkdir(mode=0o711)
        server = Embedded(deep, settings=FAST_AND_LOOSE)
        with server.in_use():
            assert server.answers()
            assert server.socket_folder.stat().st_mode & 0o077 == 0
        server.socket_folder.rmdir()

    def test_a_path_with_blanks_and_quotes(self, folder: Path) -> None:
        odd = folder / 'it\'s a "data" folder, Ωmega'
        odd.mkdir(mode=0o711)
        server = Embedded(odd, settings=FAST_AND_LOOSE)
        with server.in_use():
            assert Embedded(odd).answers()
        server.socket_folder.rmdir()

    def test_a_half_made_cluster_is_made_again(self, folder: Path) -> None:
        (folder / "postgres.new").mkdir()
        (folder / "postgres.new" / "PG_VERSION").write_text("18\n")
        server = Embedded(folder, settings=FAST_AND_LOOSE)
        server.initialise()
        assert (server.pgdata / "global").is_dir()
        assert not (folder / "postgres.new").exists()

    def test_a_cluster_of_another_version_is_refused(self, folder: Path) -> None:
        server = Embedded(folder)
        server.pgdata.mkdir()
        (server.pgdata / "PG_VERSION").write_text("99\n")
        with pytest.raises(PostgresError, match="holds a PostgreSQL 99 cluster"):
            server.initialise()


class TestSharedSecrets:
    """Two servers on one database, each with a folder of its own."""

    @pytest.fixture
    def url(self, postgres_server: Embedded, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
        for name in ("REHYDRATE_SECRET_KEY", "REHYDRATE_FIELD_KEYS"):
            monkeypatch.delenv(name)
        name = f"shared_{os.getpid()}"
        postgres_server.create_database(name)
        yield postgres_server.url(name)
        with psycopg.connect(postgres_server.url("postgres"), autocommit=True) as connection:
            connection.execute(psycopg.sql.SQL("DROP DATABASE {}").format(psycopg.sql.Identifier(name)))

    def test_the_second_gets_what_the_first_made(self, url: str, tmp_path: Path) -> None:
        shared_secrets.settle(f"{url}&password=one", tmp_path / "a.json")
        shared_secrets.settle(f"{url}&password=one", tmp_path / "b.json")
        assert (tmp_path / "a.json").read_text() == (tmp_path / "b.json").read_text()
        assert (tmp_path / "a.json").stat().st_mode & 0o777 == 0o600

    def test_the_database_alone_does_not_tell(self, url: str, tmp_path: Path) -> None:
        shared_secrets.settle(f"{url}&password=one", tmp_path / "a.json")
        secret = json.loads((tmp_path / "a.json").read_text())["secret_key"]
        with psycopg.connect(url) as connection:
            row = connection.execute("SELECT salt, sealed FROM rehydrate_shared_secrets").fetchone()
        assert secret.encode() not in b"".join(row or ())

    def test_after_a_change_of_password_a_server_that_knew_them_seals_them_anew(self, url: str, tmp_path: Path) -> None:
        shared_secrets.settle(f"{url}&password=one", tmp_path / "a.json")
        before = (tmp_path / "a.json").read_text()
        with pytest.raises(data.DataFolderError, match="sealed with another password"):
            shared_secrets.settle(f"{url}&password=two", tmp_path / "stranger.json")
        shared_secrets.settle(f"{url}&password=two", tmp_path / "a.json")
        shared_secrets.settle(f"{url}&password=two", tmp_path / "stranger.json")
        assert (tmp_path / "stranger.json").read_text() == before

    def test_nothing_is_stored_where_the_environment_names_them(
        self, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("REHYDRATE_SECRET_KEY", "given")
        monkeypatch.setenv("REHYDRATE_FIELD_KEYS", "given")
        shared_secrets.settle(url, tmp_path / "a.json")
        assert not (tmp_path / "a.json").exists()


class TestAddress:
    def test_as_djangos_settings(self) -> None:
        settings = dsn.database_settings("postgresql://u:p%40ss@db.example:5433/ledger?sslmode=require", pool=5)
        assert (settings["NAME"], settings["USER"], settings["PASSWORD"]) == ("ledger", "u", "p@ss")
        assert (settings["HOST"], settings["PORT"]) == ("db.example", "5433")
        assert settings["OPTIONS"]["sslmode"] == "require"
        assert settings["OPTIONS"]["pool"]["max_size"] == 5
        assert settings["CONN_MAX_AGE"] == 0

    def test_without_a_pool_each_thread_keeps_its_connection(self) -> None:
        assert dsn.database_settings("postgresql:///x?host=/run/pg", pool=0)["CONN_MAX_AGE"] is None

    def test_in_words_without_the_password(self) -> None:
        assert dsn.describe("postgresql://u:secret@db.example:5433/ledger") == 'database "ledger" on db.example:5433'

    @pytest.mark.parametrize("url", ["mysql://x/y", "postgresql://[", "postgresql://h/d?nonsense=1"])
    def test_what_cannot_be_read(self, url: str) -> None:
        with pytest.raises(dsn.AddressError):
            dsn.database_settings(url, pool=0)


class TestLog:
    @pytest.mark.parametrize(
        ("text", "secret"),
        [
            ("Authorization: Bearer rhk_0123456789_abcdefghijkl", "abcdefghijkl"),
            ("key rhk_0123456789_abc-def_ghi used", "abc-def_ghi"),
            ("Not Found: /api/v1/hooks/tok-en_123", "tok-en_123"),
            ("GET /sign-in/MQ.abc-123/ 200", "MQ.abc-123"),
            ("connecting to postgresql://bob:hunter2@db/x", "hunter2"),
            ('{"password": "hunter2"}', "hunter2"),
            ("token=hunter2&x=1", "hunter2"),
        ],
    )
    def test_secrets_are_blotted_out(self, text: str, secret: str) -> None:
        assert secret not in without_secrets(text)
        assert "***" in without_secrets(text)

    def test_arguments_are_seen_too(self) -> None:
        record = logging.LogRecord("x", logging.INFO, __file__, 1, "path %s", ("/hooks/abc",), None)
        assert WithoutSecrets().filter(record)
        assert record.getMessage() == "path /hooks/***"

    def test_the_rest_stays(self) -> None:
        assert without_secrets("run 0190 is waiting for legal") == "run 0190 is waiting for legal"


@pytest.mark.django_db
def test_a_database_of_a_newer_version_is_left_alone() -> None:
    from django.db import connection
    from django.db.migrations.recorder import MigrationRecorder

    from rehydrate.supervisor import preparation

    preparation.migrate()
    MigrationRecorder(connection).record_applied("rehydrate", "9999_from_the_future")
    with pytest.raises(
        data.DataFolderError, match=r"newer version of rehydrate \(it has rehydrate.9999_from_the_future\)"
    ):
        preparation.migrate()


def test_translations_are_compiled_when_their_source_is_newer(tmp_path: Path) -> None:
    source = tmp_path / "zh_Hans" / "LC_MESSAGES" / "django.po"
    source.parent.mkdir(parents=True)
    source.write_text(
        'msgid ""\nmsgstr "Content-Type: text/plain; charset=UTF-8\\n"\n\nmsgid "Inbox"\nmsgstr "收件箱"\n'
    )
    assert catalogs.compile_stale([tmp_path]) == 1
    assert "收件箱".encode() in source.with_suffix(".mo").read_bytes()
    assert catalogs.compile_stale([tmp_path]) == 0


@pytest.mark.processes
class TestCommandLine:
    def run(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("REHYDRATE_")}
        for name in ("DATABASE_URL", "DJANGO_ALLOW_ASYNC_UNSAFE"):  # the tests' own
            kept.pop(name, None)
        return subprocess.run(
            [sys.executable, "manage.py", *words],
            cwd=ROOT, env={**kept, **environment}, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    def test_the_settings_are_those_of_a_server_on_the_open_net(self, tmp_path: Path) -> None:
        done = self.run("check", "--deploy", "--fail-level", "WARNING", REHYDRATE_DATA=str(tmp_path / "data"))
        assert done.returncode == 0, done.stderr
        assert "no issues" in done.stdout + done.stderr

    def test_without_the_servers_packages_it_says_what_to_install(self, tmp_path: Path) -> None:
        code = "import sys; sys.modules['django'] = None; from rehydrate.__main__ import main; main()"
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert done.stderr.strip().endswith("pip install 'rehydrate[server]'")
        assert "Traceback" not in done.stderr

    def test_what_an_agent_imports_brings_no_django(self) -> None:
        code = "import sys, json, rehydrate.client; print(json.dumps(sorted(sys.modules)))"
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
        loaded = json.loads(done.stdout)
        assert [name for name in loaded if name.split(".")[0] in {"django", "psycopg", "rest_framework"}] == []
