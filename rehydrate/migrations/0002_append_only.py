"""The database itself refuses to change history: triggers on events and on the administrators' audit (rule 2)."""

from django.db import migrations

FORWARD = """
CREATE FUNCTION rehydrate_refuse_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '% on % is refused: history is append-only', TG_OP, TG_TABLE_NAME
        USING ERRCODE = 'integrity_constraint_violation';
END $$;
CREATE TRIGGER refuse_change BEFORE UPDATE OR DELETE ON rehydrate_ledgerevent
    FOR EACH ROW EXECUTE FUNCTION rehydrate_refuse_change();
CREATE TRIGGER refuse_truncate BEFORE TRUNCATE ON rehydrate_ledgerevent
    FOR EACH STATEMENT EXECUTE FUNCTION rehydrate_refuse_change();
CREATE TRIGGER refuse_change BEFORE UPDATE OR DELETE ON rehydrate_adminevent
    FOR EACH ROW EXECUTE FUNCTION rehydrate_refuse_change();
CREATE TRIGGER refuse_truncate BEFORE TRUNCATE ON rehydrate_adminevent
    FOR EACH STATEMENT EXECUTE FUNCTION rehydrate_refuse_change();
"""

BACKWARD = """
DROP TRIGGER refuse_truncate ON rehydrate_adminevent;
DROP TRIGGER refuse_change ON rehydrate_adminevent;
DROP TRIGGER refuse_truncate ON rehydrate_ledgerevent;
DROP TRIGGER refuse_change ON rehydrate_ledgerevent;
DROP FUNCTION rehydrate_refuse_change();
"""


class Migration(migrations.Migration):
    dependencies = [("rehydrate", "0001_ledger")]

    operations = [migrations.RunSQL(FORWARD, BACKWARD)]
