// The console's own script: keys, dialogs, theme, drafts, clocks. Everything here only makes quicker what plain links and
// forms do; nothing decides anything. htmx fetches and swaps.

const doc = document;
const root = doc.documentElement;
root.classList.add("js");
const $ = (selector, from = doc) => from.querySelector(selector);
const $$ = (selector, from = doc) => [...from.querySelectorAll(selector)];
const announce = (text) => { const live = $("#announce"); if (live && text) live.textContent = text; };

// --- theme: at once, then kept on the server -------------------------------------------------------------------------
doc.addEventListener("submit", (event) => {
  const button = event.submitter;
  if (!button || button.name !== "theme") return;
  event.preventDefault();
  root.dataset.theme = button.value;
  const data = new FormData(event.target);
  data.set("theme", button.value);
  fetch(event.target.action, { method: "POST", body: data, headers: { "X-Requested-With": "fetch" } });
  $$(`button[name=theme]`, event.target).find((other) => other !== button)?.focus();
});

// --- the reader's zone, for the server's times ------------------------------------------------------------------------
const zone = Intl.DateTimeFormat().resolvedOptions().timeZone;
if (zone && !doc.cookie.includes(`rehydrate_zone=${zone}`)) doc.cookie = `rehydrate_zone=${zone};path=/;max-age=31536000;samesite=lax`;

// --- clocks: "46 min ago" stays true between two answers ----------------------------------------------------------------
const patterns = JSON.parse($("#time-patterns")?.textContent || "null");
const fill = (text, values) => text.replace(/%\((\w+)\)[ds]/g, (_, name) => values[name]);
function length(total) {
  total = Math.max(0, Math.trunc(total));
  if (total < 60) return fill(patterns.s, { s: total });
  if (total < 3600) return fill(patterns.m, { m: Math.trunc(total / 60) });
  const hours = Math.trunc(total / 3600), days = Math.trunc(total / 86400);
  if (total < 86400) { const m = Math.trunc((total % 3600) / 60); return m ? fill(patterns.hm, { h: hours, m }) : fill(patterns.h, { h: hours }); }
  const rest = Math.trunc((total % 86400) / 3600);
  return days >= 10 || !rest ? fill(patterns.d, { d: days }) : fill(patterns.dh, { d: days, h: rest });
}
function tick() {
  if (!patterns || doc.hidden) return;
  for (const element of $$("time[data-form]")) {
    const seconds = (Date.parse(element.dateTime) - Date.now()) / 1000, form = element.dataset.form;
    const time = length(Math.abs(seconds));
    const text = form === "for" ? time
      : form === "left" ? fill(seconds > 0 ? patterns.left : patterns.over, { time })
      : Math.abs(seconds) < 5 ? patterns.now : fill(seconds > 0 ? patterns.in : patterns.ago, { time });
    if (element.textContent !== text) element.textContent = text;
    const due = element.closest(".due");
    if (due && form === "left") due.toggleAttribute("data-soon", seconds < 7200);
  }
}
setInterval(tick, 1000);

// --- copying what stands in a field ------------------------------------------------------------------------------------
doc.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-copy]");
  if (!button) return;
  const field = doc.getElementById(button.dataset.copy);
  field.select();
  try { await navigator.clipboard.writeText(field.value); } catch { doc.execCommand("copy"); } // no clipboard without TLS
  announce(button.dataset.done);
  const label = button.textContent;
  button.textContent = button.dataset.done;
  setTimeout(() => { button.textContent = label; }, 2000);
});

// --- dialogs: a confirmation opens beside the page; without this script it is a page of its own -------------------------
const dialog = $("#dialog"), dialogBody = $("#dialog-body");
let opener = null;
function openDialog(url, from) {
  if (!dialog || !window.htmx) { location.href = url; return; }
  opener = from || doc.activeElement;
  dialogBody.innerHTML = '<div class="loading" aria-hidden="true"><i></i><i></i><i></i></div>';
  if (!dialog.open) dialog.showModal();
  htmx.ajax("GET", url, { target: "#dialog-body", swap: "innerHTML" }).catch(() => { location.href = url; });
}
doc.addEventListener("click", (event) => {
  const close = event.target.closest("[data-close]");
  if (close) {
    const holder = close.closest("dialog");
    if (holder) { event.preventDefault(); holder.close(); }
    return;
  }
  if (event.target.closest("[data-open-keys]")) { $("#keys").showModal(); return; }
  if (event.target === dialog) { dialog.close(); return; }
  for (const menu of $$("details.menu[open]")) if (!menu.contains(event.target) || event.target.closest("a")) menu.open = false;
  const link = event.target.closest("a[data-dialog]");
  if (link && !event.metaKey && !event.ctrlKey && !event.shiftKey && event.button === 0) {
    event.preventDefault();
    openDialog(link.href, link);
  }
});
dialog?.addEventListener("close", () => {
  const waits = $("#wait-state"); if (waits) htmx.trigger(waits, "htmx:abort");
  const back = opener && doc.contains(opener) ? opener : opener?.id && doc.getElementById(opener.id);
  dialogBody.innerHTML = "";
  (back || $("#main"))?.focus();
  opener = null;
});
const focusIn = (holder) => (
  $("[data-focus]", holder) || $("[aria-invalid=true]", holder) || $("[autofocus]", holder)
  || $(".field input:not([type=hidden]), .field select, .field textarea", holder) || $(".actions .btn", holder) || $("h2", holder)
)?.focus();

// --- drafts: what was typed comes back after a reload, a sign-in or a closed dialog --------------------------------------
const draftKey = (form) => `draft:${form.dataset.draft}`;
const typed = (form) => $$("input:not([type=hidden], [type=password]), textarea, select", form).filter((field) => field.name);
function keepDraft(form) {
  const values = typed(form).map((field) => [field.name, field.type === "checkbox" || field.type === "radio" ? [field.value, field.checked] : field.value]);
  try { sessionStorage.setItem(draftKey(form), JSON.stringify(values)); } catch { /* full or forbidden: then not */ }
}
function restoreDraft(form) {
  if (form.dataset.restored) return;
  form.dataset.restored = "1";
  if ($("[aria-invalid=true], .notice", form.parentElement)) return; // the server has just given back what was typed
  let kept; try { kept = JSON.parse(sessionStorage.getItem(draftKey(form)) || "null"); } catch { kept = null; }
  for (const [name, value] of kept || []) {
    for (const field of typed(form).filter((one) => one.name === name)) {
      if (Array.isArray(value)) { if (field.value === value[0]) field.checked = value[1]; } else if (field.type !== "radio" && field.type !== "checkbox") field.value = value;
    }
  }
}
doc.addEventListener("input", (event) => { const form = event.target.closest("form[data-draft]"); if (form) keepDraft(form); });
doc.addEventListener("submit", (event) => {
  const form = event.target;
  if (event.defaultPrevented || form.method !== "post") return;
  if (form.dataset.draft && !form.hasAttribute("hx-post") && event.submitter?.value !== "preview") sessionStorage.removeItem(draftKey(form));
  if (form.hasAttribute("hx-post")) return;
  if (form.dataset.sent) { event.preventDefault(); return; } // one click sends once; the server's token sees to the rest
  form.dataset.sent = "1";
  setTimeout(() => delete form.dataset.sent, 4000);
});
window.addEventListener("pageshow", () => $$("form[data-sent]").forEach((form) => delete form.dataset.sent));

// --- more rows of conditions ------------------------------------------------------------------------------------------
doc.addEventListener("click", (event) => {
  const button = event.target.closest("[data-add-row]");
  if (!button) return;
  event.preventDefault();
  const rows = $$(".cond-row", button.closest("[data-conditions]"));
  const copy = rows.at(-1).cloneNode(true);
  for (const field of $$("select, input", copy)) {
    field.name = field.name.replace(/\d+$/, rows.length);
    field.removeAttribute("aria-invalid"); field.removeAttribute("aria-describedby");
    if (field.tagName === "INPUT") field.value = ""; else field.selectedIndex = 0;
  }
  $$(".error", copy).forEach((error) => error.remove());
  rows.at(-1).after(copy);
  $("select, input", copy).focus();
});

// --- selection ----------------------------------------------------------------------------------------------------------
const picks = new Set();
function showPicks() {
  const bar = $("[data-bulk-bar]"); if (!bar) return;
  bar.hidden = picks.size === 0;
  $("[data-bulk-count]").textContent = picks.size;
}
doc.addEventListener("change", (event) => {
  if (!event.target.matches("[data-pick]")) return;
  event.target.checked ? picks.add(event.target.value) : picks.delete(event.target.value);
  showPicks();
});
doc.addEventListener("click", (event) => {
  if (!event.target.closest("[data-bulk-clear]")) return;
  picks.clear(); $$("[data-pick]").forEach((box) => { box.checked = false; }); showPicks();
});

// --- keys: never inside an input, never with a modifier, never more than opening a confirmation --------------------------
const rowLinks = () => $$("[data-rows] [data-row] > a, [data-rows] .row-link");
function move(step) {
  const links = rowLinks(); if (!links.length) return;
  const here = links.findIndex((link) => link === doc.activeElement || link.closest("[data-row]").contains(doc.activeElement));
  const current = here >= 0 ? here : links.findIndex((link) => link.getAttribute("aria-current") === "true");
  const to = links[current < 0 ? (step > 0 ? 0 : links.length - 1) : Math.min(links.length - 1, Math.max(0, current + step))];
  to.focus(); to.scrollIntoView({ block: "nearest" });
  if ($("[data-run]") && here < 0) to.click();
}
const subject = () => doc.activeElement?.closest("[data-row][data-approve]") || $("[data-run][data-approve]");
doc.addEventListener("keydown", (event) => {
  if (doc.body.dataset.shortcuts !== "on" || event.defaultPrevented) return;
  if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing || event.repeat && !"jk".includes(event.key)) return;
  // a dialog that has just closed holds the focus until the next frame: what is typed then is meant for the page
  const holder = event.target.closest("dialog");
  if (holder ? holder.open : event.target.closest("input, textarea, select, [contenteditable]")) return;
  const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
  if (key === "j") move(1);
  else if (key === "k") move(-1);
  else if (key === "a" || key === "r") { const one = subject(); if (!one) return; openDialog(key === "a" ? one.dataset.approve : one.dataset.reject, $("a", one)); }
  else if (key === "x") { const box = $("[data-pick]", doc.activeElement?.closest("[data-row]") || doc.createElement("i")); if (!box) return; box.click(); }
  else if (key === "/") { const search = $("[data-search]"); if (!search) { location.href = "/"; return; } search.focus(); search.select(); }
  else if (key === "?") $("#keys")?.showModal();
  else return;
  event.preventDefault();
});

// --- live: a request that is answered when there is news, then the next one; none from a page that nobody sees ----------
const POLLS = ["live", "wait-state"];
const isPoll = (element) => POLLS.includes(element?.id);
const pauses = {};
function look(id, after) {
  clearTimeout(pauses[id]);
  pauses[id] = setTimeout(() => { const poll = doc.getElementById(id); if (poll && !doc.hidden) htmx.trigger(poll, "look"); }, after);
}
const jitter = (most) => Math.random() * most;
function lookAgain(id, status) {
  if (status === 204) look(id, jitter(200)); // nothing within the server's patience
  else if (status === 200 && id === "live") { look(id, skipped ? 1500 : 700); skipped = false; }
  else if (status === 200) return; // a confirmation that is out of date stays so
  else if (status === 401 || status === 404) look(id, 5000);
  else look(id, 1500 + jitter(1500)); // not reached, or in trouble: not everybody at once
}
doc.addEventListener("visibilitychange", () => {
  for (const id of POLLS) { const poll = doc.getElementById(id); if (poll && doc.hidden) htmx.trigger(poll, "htmx:abort"); else if (poll) look(id, 0); }
});
window.addEventListener("pageshow", () => look("live", 100));

// --- htmx: focus that stays, trouble that is told -------------------------------------------------------------------------
const trouble = $("#trouble");
const tell = (what) => { if (!trouble) return; trouble.hidden = !what; trouble.textContent = what ? trouble.dataset[what] : ""; };
let openDetails = [];
doc.addEventListener("htmx:sendError", () => tell("offline"));
doc.addEventListener("htmx:afterRequest", (event) => {
  const status = event.detail.xhr?.status;
  const asker = event.detail.requestConfig?.elt; // the event's own element is another one when the answer replaced it
  if (status === 401) tell("signedout");
  else if (status >= 500) tell(isPoll(asker) ? "offline" : "failed");
  else if (status) tell("");
  if (asker?.dataset?.draft && status === 204) sessionStorage.removeItem(draftKey(asker));
  if (isPoll(asker)) lookAgain(asker.id, status);
});
doc.addEventListener("htmx:oobBeforeSwap", (event) => {
  const target = event.detail.target;
  // a selection of text, or something being typed, is worth more than being a moment newer: the next answer tries again
  const chosen = doc.getSelection();
  const busy = (chosen && !chosen.isCollapsed && target.contains(chosen.anchorNode)) || target.contains(doc.activeElement?.closest("input:not([type=checkbox]), textarea, select"));
  if (busy) { event.detail.shouldSwap = false; skipped = true; return; }
  openDetails.push(...$$("details[open][id]", target).map((one) => one.id));
  const held = doc.activeElement; if (held?.id && target.contains(held)) refocus = held.id;
});
let skipped = false, refocus = "";
doc.addEventListener("htmx:oobAfterSwap", (event) => {
  for (const id of openDetails) { const one = doc.getElementById(id); if (one) one.open = true; }
  if (refocus && doc.activeElement === doc.body) { doc.getElementById(refocus)?.focus({ preventScroll: true }); }
  refocus = "";
  for (const box of $$("[data-pick]")) box.checked = picks.has(box.value);
  for (const value of picks) if (!$(`[data-pick][value="${value}"]`)) picks.delete(value);
  showPicks();
  if (event.detail.target?.id === "live" && skipped) $("#live").setAttribute("hx-vals", '{"state": ""}');
});
doc.addEventListener("htmx:afterSettle", (event) => {
  openDetails = [];
  if (event.detail.target?.id === "dialog-body") { $$("form[data-draft]", dialogBody).forEach(restoreDraft); focusIn(dialogBody); look("wait-state", 100); }
});
doc.addEventListener("announce", (event) => announce(event.detail.value));

$$("form[data-draft]").forEach(restoreDraft);
const first = $("main [data-focus]"); if (first) first.focus();
for (const flash of $$(".flash")) announce(flash.textContent.trim());
// the style sheet keeps the menu unfolded on wide screens; browsers that cannot do that are helped
const fold = $(".rail-fold");
if (fold && !CSS.supports("selector(::details-content)")) {
  const narrow = matchMedia("(max-width: 760px)");
  const set = () => { fold.open = !narrow.matches; };
  set(); narrow.addEventListener("change", set);
}
