"""A form made from a JSON Schema, and its answer read back as JSON."""

from __future__ import annotations

from approvals import conditions, schema_form
from approvals.present import guessed_schema

SCHEMA = {
    "type": "object",
    "required": ["supplier"],
    "properties": {
        "supplier": {"type": "string", "title": "Supplier"},
        "pages": {"type": "integer", "minimum": 1},
        "rate": {"type": "number"},
        "urgent": {"type": "boolean"},
        "level": {"enum": [1, 2, 3]},
        "valid_until": {"type": "string", "format": "date"},
        "address": {"type": "object", "properties": {"city": {"type": "string"}}},
        "lines": {"type": "array"},
    },
}
DOCUMENT = {"supplier": "Acme", "pages": 6, "urgent": True, "level": 2, "address": {"city": "Ulm"}, "number": "X-1"}


def form(**answers: str) -> tuple[list[schema_form.Field], object, bool]:
    found = schema_form.fields(SCHEMA, DOCUMENT)
    posted = {f.name: f.value for f in found if f.kind != "boolean" or f.value == "true"}
    posted |= {f"field:/{name.replace('__', '/')}": value for name, value in answers.items()}
    result, good = schema_form.read(found, posted, DOCUMENT)
    return found, result, good


def test_each_part_of_the_schema_becomes_a_field_of_its_kind() -> None:
    kinds = {f.pointer: f.kind for f in schema_form.fields(SCHEMA, DOCUMENT)}
    assert kinds == {
        "/supplier": "text",
        "/pages": "integer",
        "/rate": "number",
        "/urgent": "boolean",
        "/level": "choice",
        "/valid_until": "date",
        "/address/city": "text",
        "/lines": "json",
    }


def test_an_untouched_form_gives_the_same_document_back() -> None:
    _, result, good = form()
    assert good
    assert result == DOCUMENT


def test_answers_come_back_in_their_types_and_the_rest_stays() -> None:
    _, result, good = form(pages="7", rate="0.25", level="3", address__city="Bonn", lines='["a"]')
    assert good
    assert result == {
        **DOCUMENT, "pages": 7, "rate": 0.25, "level": 3, "address": {"city": "Bonn"}, "lines": ["a"],
    }  # fmt: skip


def test_what_cannot_be_read_is_told_at_its_field() -> None:
    found, _, good = form(supplier="", pages="six", rate="1e400", level="9", lines="[")
    assert not good
    assert {f.pointer for f in found if f.error} == {"/supplier", "/pages", "/rate", "/level", "/lines"}


def test_numbers_that_would_not_come_back_exactly_are_refused() -> None:
    found, _, good = form(rate="0.1234567890123456789")
    assert not good
    assert next(f for f in found if f.pointer == "/rate").error


def test_the_ledgers_errors_find_their_fields() -> None:
    found = schema_form.fields(SCHEMA, DOCUMENT)
    errors = [{"pointer": "/arguments/address/city", "detail": "too short"}, {"pointer": "/reason", "detail": "needed"}]
    assert schema_form.mark_errors(found, errors) == ["needed"]
    assert next(f for f in found if f.pointer == "/address/city").error == "too short"


def test_without_a_schema_every_argument_may_be_edited_in_its_own_type() -> None:
    found = schema_form.fields(guessed_schema(DOCUMENT), DOCUMENT)
    assert {f.pointer: f.kind for f in found} == {
        "/supplier": "text", "/pages": "integer", "/urgent": "boolean", "/level": "integer", "/address/city": "text",
        "/number": "text",
    }  # fmt: skip


def test_conditions_take_the_type_of_what_they_limit() -> None:
    arguments = {"amount": "12000.00", "pages": 6, "country": "DE", "urgent": True}
    posted = {
        "pointer-0": "/amount", "op-0": "<=", "value-0": "12000",
        "pointer-1": "/pages", "op-1": ">", "value-1": "3",
        "pointer-2": "/country", "op-2": "in", "value-2": "DE, AT，CH",
        "pointer-3": "", "op-3": "<=", "value-3": "",
    }  # fmt: skip
    _, found, good = conditions.read(posted, arguments)
    assert good
    assert found == [
        {"pointer": "/amount", "op": "<=", "value": "12000"},
        {"pointer": "/pages", "op": ">", "value": 3},
        {"pointer": "/country", "op": "in", "value": ["DE", "AT", "CH"]},
    ]


def test_a_condition_that_says_nothing_is_told_at_its_row() -> None:
    rows, found, good = conditions.read({"pointer-0": "/nowhere", "op-0": "<=", "value-0": "1"}, {"amount": "1"})
    assert (found, good) == ([], False)
    assert rows[0].error
    rows, _, good = conditions.read({"pointer-0": "", "op-0": "<=", "value-0": ""}, {"amount": "1"})
    assert not good
    assert rows[0].error
