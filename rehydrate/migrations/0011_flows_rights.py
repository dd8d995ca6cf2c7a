"""A flow's policy counts among what the number of rights stands for: who knows the number knows which policy is newest.

What a process remembers of a run (see `rehydrate.memory`) is saved only at the number at which it was known.
"""

from django.db import migrations

FORWARD = """
CREATE TRIGGER raise_rights AFTER INSERT OR DELETE OR TRUNCATE OR UPDATE OF id, workspace_id, name, current
    ON rehydrate_flow FOR EACH STATEMENT EXECUTE FUNCTION rehydrate_raise_rights();
ALTER TABLE rehydrate_flow ENABLE ALWAYS TRIGGER raise_rights;
"""


class Migration(migrations.Migration):
    dependencies = [("rehydrate", "0010_rights")]

    operations = [migrations.RunSQL(FORWARD, "DROP TRIGGER raise_rights ON rehydrate_flow;")]
