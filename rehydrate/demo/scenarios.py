"""What the demo's runs are about: customers, orders, prices, made from a run's number. No behaviour lives here."""

from __future__ import annotations

import re
from dataclasses import dataclass

FLOWS = ("contract-approval", "after-sales", "purchasing", "operations")
# How the runs of a flow are named, and the number of its first one.
NAMES = {
    "contract-approval": ("contract", 17),
    "after-sales": ("case", 31),
    "purchasing": ("po", 1001),
    "operations": ("campaign", 5),
}
AT_START = 2


@dataclass(frozen=True)
class Contract:
    customer: str
    email: str
    subject: str
    amount: str
    currency: str
    payment_days: int
    unusual: str


@dataclass(frozen=True)
class Case:
    customer: str
    email: str
    product: str
    order: str
    refund: str
    currency: str
    complaint: str
    wanted: tuple[str, ...]
    answers_after: int | None  # seconds after which the customer answers unasked; None: you play the customer


@dataclass(frozen=True)
class Order:
    supplier: str
    second_supplier: str
    item: str
    quantity: int
    total: str
    second_total: str
    currency: str
    confirms_after: int | None  # None: this supplier keeps silent until reminded


@dataclass(frozen=True)
class Campaign:
    title: str
    discount_percent: int
    starts_on: str
    banner: str
    products: tuple[str, ...]
    expected: str


CONTRACTS = (
    Contract(
        "Northwind Bakery", "office@northwind.example", "24 months of oven maintenance", "48000.00", "EUR", 30,
        "The amount is above the 45,000 EUR that the frame contract foresees.",
    ),
    Contract(
        "Harbour Logistics", "contracts@harbour.example", "Lease of six electric forklifts", "127500.00", "EUR", 60,
        "The customer asks for 60 days to pay; our standard is 30.",
    ),
    Contract(
        "St. Anne's Hospital", "purchasing@stanne.example", "Cleaning of the north wing", "36200.00", "EUR", 30,
        "Nothing: standard terms and a price from the list.",
    ),
)  # fmt: skip

CASES = (
    Case(
        "Ingrid Lindqvist", "ingrid@mail.example", "Coffee machine CM-300", "A-20318", "189.00", "EUR",
        "The machine leaks since the second week.", ("a photo of the damage", "the receipt"), None,
    ),
    Case(
        "Tomasz Nowak", "tomasz@mail.example", "Running shoes, size 43", "A-20355", "74.90", "EUR",
        "The left sole came off on the first run.", ("a photo of the sole",), 8,
    ),
    Case(
        "Amara Okafor", "amara@mail.example", "Desk lamp Lumo", "A-20402", "39.50", "EUR",
        "The lamp arrived with a broken shade.", ("a photo of the parcel", "a photo of the lamp"), 20,
    ),
)  # fmt: skip

ORDERS = (
    Order("Nordholz Timber", "Brook & Sons", "oak boards, 2 m", 120, "2640.00", "2810.00", "EUR", 15),
    Order("Slow River Mill", "Nordholz Timber", "birch panels, 18 mm", 40, "1320.00", "1410.00", "EUR", None),
    Order("Brook & Sons", "Nordholz Timber", "brass hinges", 500, "875.00", "920.00", "EUR", 15),
)

CAMPAIGNS = (
    Campaign(
        "the spring price list", 15, "2027-03-01", "Spring days: 15 % off all lamps!", ("Lumo", "Halo", "Ember"),
        "about 900 more visits a day and 40 more orders, going by last spring",
    ),
    Campaign(
        "the garden sale", 35, "2027-08-15", "Everything for the garden, 35 % off!!!", ("Bench Ida", "Table Ole"),
        "the rest of the summer stock sold by the end of the month",
    ),
)  # fmt: skip


def external_id(flow: str, index: int) -> str:
    name, first = NAMES[flow]
    return f"{name}-{first + index}"


def index_of(flow: str, external_id: str) -> int:
    """The run's place in its flow, from 0; runs named otherwise are like the first one."""
    name, first = NAMES[flow]
    number = re.fullmatch(rf"{name}-(\d+)", external_id)
    return max(0, int(number.group(1)) - first) if number else 0


def contract(external_id: str) -> Contract:
    return CONTRACTS[index_of("contract-approval", external_id) % len(CONTRACTS)]


def case(external_id: str) -> Case:
    return CASES[index_of("after-sales", external_id) % len(CASES)]


def order(external_id: str) -> Order:
    return ORDERS[index_of("purchasing", external_id) % len(ORDERS)]


def campaign(external_id: str) -> Campaign:
    return CAMPAIGNS[index_of("operations", external_id) % len(CAMPAIGNS)]


def title(flow: str, external_id: str) -> str:
    """What a run is called in lists."""
    if flow == "contract-approval":
        deal = contract(external_id)
        return f"{external_id}: {deal.subject} for {deal.customer}"
    if flow == "after-sales":
        complaint = case(external_id)
        return f"{external_id}: {complaint.product} of {complaint.customer}"
    if flow == "purchasing":
        buy = order(external_id)
        return f"{external_id}: {buy.quantity} × {buy.item} from {buy.supplier}"
    return f"{external_id}: {campaign(external_id).title}"


def document(flow: str, external_id: str) -> list[tuple[str, str]]:
    """The paper that a run starts from, as labelled lines: what an evidence link shows."""
    if flow == "contract-approval":
        deal = contract(external_id)
        return [
            ("Customer", deal.customer),
            ("Subject", deal.subject),
            ("Price", f"{deal.amount} {deal.currency}"),
            ("To be paid within", f"{deal.payment_days} days"),
            ("Different from our standard", deal.unusual),
        ]
    if flow == "after-sales":
        complaint = case(external_id)
        return [
            ("Customer", complaint.customer),
            ("Order", complaint.order),
            ("Product", complaint.product),
            ("Price paid", f"{complaint.refund} {complaint.currency}"),
            ("What the customer says", complaint.complaint),
        ]
    if flow == "purchasing":
        buy = order(external_id)
        return [
            ("Supplier", buy.supplier),
            ("What", f"{buy.quantity} × {buy.item}"),
            ("Price", f"{buy.total} {buy.currency}"),
            ("Second supplier", f"{buy.second_supplier}, {buy.second_total} {buy.currency}"),
        ]
    sale = campaign(external_id)
    return [
        ("Campaign", sale.title),
        ("Discount", f"{sale.discount_percent} %"),
        ("From", sale.starts_on),
        ("Banner", sale.banner),
        ("Products", ", ".join(sale.products)),
        ("Expected", sale.expected),
    ]
