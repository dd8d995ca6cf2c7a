"""Rights have a number, which every change of what decides who a caller is raises (see `rehydrate.rights`).

The database keeps it, so that it makes no difference who writes: the console, a command, somebody with psql. It never
has the same value twice, not even after a backup was restored or the table emptied: somebody may have kept a caller
under the number that comes next. So it is the time, or where that does not go on, one more. It is raised within the
transaction of the change; those who change rights at the same time take turns.

What counts of an update are the columns that a caller, or who may decide, is made of: not when a key was last used, or a
person signed in.
"""

from typing import Final

from django.conf import settings
from django.db import migrations

#: The tables, and of their updates the columns that count.
TABLES: Final = {
    "rehydrate_apikey": "id, kind, name, prefix, digest, workspace_id, user_id, flows, scopes, revoked_at",
    "auth_user": "id, username, first_name, last_name, is_active, is_superuser",
    "rehydrate_group": "id, workspace_id, name, roles",
    "rehydrate_membership": "id, group_id, user_id",
    "rehydrate_workspace": "id",
}

FORWARD = """
CREATE TABLE rehydrate_rights (id smallint PRIMARY KEY CHECK (id = 1), number bigint NOT NULL);
CREATE FUNCTION rehydrate_raise_rights() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO rehydrate_rights AS r VALUES (1, extract(epoch FROM clock_timestamp()) * 1000000)
    ON CONFLICT (id) DO UPDATE SET number = greatest(r.number + 1, EXCLUDED.number);
    RETURN NULL;
END $$;
INSERT INTO rehydrate_rights VALUES (1, extract(epoch FROM clock_timestamp()) * 1000000);
"""

BACKWARD = """
DROP FUNCTION rehydrate_raise_rights();
DROP TABLE rehydrate_rights;
"""


def _trigger(table: str, columns: str) -> migrations.RunSQL:
    """Always: also for those who switch triggers off for themselves, as what restores data may."""
    forward = f"""
CREATE TRIGGER raise_rights AFTER INSERT OR DELETE OR TRUNCATE OR UPDATE OF {columns} ON {table}
    FOR EACH STATEMENT EXECUTE FUNCTION rehydrate_raise_rights();
ALTER TABLE {table} ENABLE ALWAYS TRIGGER raise_rights;
"""
    return migrations.RunSQL(forward, f"DROP TRIGGER raise_rights ON {table};")


class Migration(migrations.Migration):
    dependencies = [("rehydrate", "0009_pages"), migrations.swappable_dependency(settings.AUTH_USER_MODEL)]

    operations = [
        migrations.RunSQL(FORWARD, BACKWARD),
        *(_trigger(table, columns) for table, columns in TABLES.items()),
    ]
