from django.db import migrations


class Migration(migrations.Migration):
    dependencies = [("rehydrate", "0009_pages")]
    operations = [
        migrations.RunSQL(
            "CREATE TABLE rehydrate_rights (id smallint primary key, number bigint); INSERT INTO rehydrate_rights VALUES (1, 1)",
            "DROP TABLE rehydrate_rights",
        )
    ]
