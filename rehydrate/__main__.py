"""The command line: `manage.py` and the console script `rehydrate`. Finds the data folder and database."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from contextlib import ExitStack

# Run without a database, or (up) with one that they start themselves.
WITHOUT_DATABASE = {
    "up", "help", "version", "--version", "--help", "-h", "check", "collectstatic", "compilemessages", "diffsettings",
    "drill", "findstatic", "makemessages", "spectacular", "startapp", "startproject", "test",
    "testserver",
}  # fmt: skip


def main() -> None:
    """Runs one management command; exits with one sentence where the machine is not ready for it.

    `doctor` is for the machines of agents: it needs no more than the client does.
    """
    if sys.argv[1:2] == ["doctor"]:
        from rehydrate.client import doctor

        sys.exit(doctor.main(sys.argv[2:]))
    if importlib.util.find_spec("django") is None:
        sys.exit("This command belongs to the server, which is not installed here: pip install 'rehydrate[server]'")
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "rehydrate.settings")
    command = sys.argv[1] if len(sys.argv) > 1 else "help"
    _take_data_option()

    from django.core.management import execute_from_command_line

    from rehydrate import data, dsn, postgres

    try:
        with ExitStack() as stack:
            helping = bool({"-h", "--help"} & set(sys.argv))
            # `up` has seen to it for the processes that it starts.
            if not helping and not os.environ.get("REHYDRATE_SUPERVISED"):
                _see_to_the_database(command, stack)
            execute_from_command_line(sys.argv)
    except (data.DataFolderError, postgres.PostgresError, dsn.AddressError, dsn.UnreachableError) as error:
        sys.exit(f"error: {error}")
    except BrokenPipeError:
        # The reader of our output has gone (`... | head`): nothing is left to say.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _see_to_the_database(command: str, stack: ExitStack) -> None:
    """The folder and its secrets, before the settings read them; the embedded server for as long as `stack` is open."""
    from rehydrate import data, postgres, shared_secrets

    from_a_file = command == "verify_ledger" and any(word.startswith("--file") for word in sys.argv)
    if from_a_file or (command in WITHOUT_DATABASE and command != "up"):
        return
    folder = data.prepare()
    if url := os.environ.get("DATABASE_URL"):
        shared_secrets.settle(url, data.secrets_file())
    elif command != "up":
        stack.enter_context(postgres.Embedded(folder).in_use())


def _take_data_option() -> None:
    """`up --data DIR` names the folder that the settings read, so it counts before they are loaded."""
    for place, word in enumerate(sys.argv):
        if word == "--data" and place + 1 < len(sys.argv):
            os.environ["REHYDRATE_DATA"] = sys.argv[place + 1]
        elif word.startswith("--data="):
            os.environ["REHYDRATE_DATA"] = word.removeprefix("--data=")


if __name__ == "__main__":
    main()
