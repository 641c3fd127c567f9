"use strict";
const byId = (id) => document.getElementById(id);

// The passages that stand in the page now. A page that shows others later aborts the signal, which takes the listeners away.
function startView(signal) {
  const data = JSON.parse(byId("data").textContent);
  const body = document.querySelector("tbody");
  const readout = byId("readout");
  const tip = byId("tip");
  // rows in page order at load: the order of data.rows
  const rows = [...body.rows].map((row, index) => ({
    row,
    words: [...row.querySelectorAll(".passage i")],
    passage: row.querySelector(".passage"),
    values: data.rows[index].values,
    scores: data.rows[index].scores,
    answers: data.rows[index].answers,
    shown: [],
    highest: 0,
    word: -1,
  }));
  rows.forEach((entry) => {
    entry.row.entry = entry;
  });

  const chosenParts = () => {
    const [kind, number] = byId("part").value.split(":");
    const all = data.parts.map((_, index) => index);
    if (kind === "layer") return all.filter((index) => data.parts[index].layer === Number(number));
    return kind === "part" ? [Number(number)] : all;
  };

  // one word of the query, over all heads; "" is the whole query, by the chosen heads
  const queryWord = () => (byId("query-word") ? byId("query-word").value : "");

  const partName = () => {
    if (queryWord() !== "") return `answers to ${byId("query-word").selectedOptions[0].textContent}, all heads`;
    return byId("part").selectedOptions[0].textContent;
  };

  const sumOver = (parts, pick) => parts.reduce((total, part) => total + pick(part), 0);

  function shade() {
    const parts = chosenParts();
    const asked = queryWord();
    for (const entry of rows) {
      entry.shown = asked === ""
        ? entry.words.map((_, word) => sumOver(parts, (part) => entry.values[part][word]))
        : [...entry.answers[Number(asked)]];
      entry.highest = Math.max(0, ...entry.shown);
      entry.score = asked === ""
        ? sumOver(parts, (part) => entry.scores[part])
        : entry.shown.reduce((total, value) => total + value, 0);
    }
    const overall = Math.max(...rows.map((entry) => entry.highest));
    for (const entry of rows) {
      const highest = byId("scale").value === "list" ? overall : entry.highest;
      entry.shares = entry.shown.map((value) => (highest > 0 ? Math.max(0, value) / highest : 0));
      entry.words.forEach((word, index) => {
        const share = entry.shares[index];
        if (share >= data.shadeFrom) word.style.setProperty("--a", share.toFixed(2));
        else word.removeAttribute("style");
      });
      const best = entry.shares.map((share, index) => [share, index]).sort((a, b) => b[0] - a[0] || a[1] - b[1]);
      const named = best.filter(([share]) => share >= data.shadeFrom).slice(0, 5);
      entry.row.querySelector(".strongest span").textContent =
        named.map(([share, index]) => `${entry.words[index].textContent} ${Math.round(100 * share)}`).join(", ") || "none";
    }
    const ranked = [...rows].sort((a, b) => b.score - a.score || a.row.dataset.rank - b.row.dataset.rank);
    ranked.forEach((entry, place) => {
      entry.row.dataset.view = place + 1;
      entry.row.querySelector(".view").textContent = place + 1;
    });
  }

  function sort() {
    const key = byId("sort").value;
    const ordered = [...rows].sort((a, b) => a.row.dataset[key] - b.row.dataset[key] || a.row.dataset.rank - b.row.dataset.rank);
    body.append(...ordered.map((entry) => entry.row));
    for (const head of document.querySelectorAll("th[data-sort]")) {
      head.setAttribute("aria-sort", head.dataset.sort === key ? "ascending" : "none");
    }
  }

  function describe(entry, index) {
    const dropped = entry.words[index].classList.contains("dropped") ? ", dropped by the calibration" : "";
    const share = Math.round(100 * entry.shares[index]);
    return `${entry.words[index].textContent}: ${entry.shown[index].toPrecision(3)} (${share} of 100)${dropped}`;
  }

  function moveTo(entry, index) {
    document.querySelectorAll(".current").forEach((word) => word.classList.remove("current"));
    entry.word = Math.min(Math.max(index, 0), entry.words.length - 1);
    const word = entry.words[entry.word];
    word.classList.add("current");
    word.scrollIntoView({ block: "nearest" });
    readout.textContent = `${describe(entry, entry.word)} · ${partName()}`;
  }

  function onKey(event) {
    const passage = event.target.closest && event.target.closest(".passage");
    if (!passage || event.altKey || event.ctrlKey || event.metaKey) return;
    const entry = passage.closest("tr").entry;
    const targets = { ArrowRight: entry.word + 1, ArrowLeft: entry.word - 1, Home: 0, End: entry.words.length - 1 };
    if (event.key in targets && entry.words.length) {
      event.preventDefault();
      moveTo(entry, targets[event.key]);
    } else if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      const row = passage.closest("tr");
      const next = event.key === "ArrowDown" ? row.nextElementSibling : row.previousElementSibling;
      if (next) {
        event.preventDefault();
        next.querySelector(".passage").focus();
      }
    }
  }

  function onPointer(event) {
    const word = event.target.closest && event.target.closest(".passage i");
    tip.hidden = !word;
    if (!word) return;
    const entry = word.closest("tr").entry;
    tip.textContent = describe(entry, entry.words.indexOf(word));
    const box = word.getBoundingClientRect();
    const left = Math.min(Math.max(box.left, 8), window.innerWidth - tip.offsetWidth - 8);
    tip.style.left = `${left}px`;
    tip.style.top = `${box.top > 44 ? box.top - tip.offsetHeight - 6 : box.bottom + 6}px`;
  }

  const reshade = () => {
    shade();
    sort();
    readout.textContent = `Shaded by ${partName()}`;
  };
  byId("part").addEventListener("change", () => {
    if (byId("query-word")) byId("query-word").value = "";
    reshade();
  });
  if (byId("query-word")) byId("query-word").addEventListener("change", reshade);
  byId("scale").addEventListener("change", shade);
  byId("sort").addEventListener("change", sort);
  byId("short").addEventListener("change", (event) => body.classList.toggle("short", event.target.checked));
  document.querySelector("thead").addEventListener("click", (event) => {
    const head = event.target.closest("th[data-sort]");
    if (!head) return;
    byId("sort").value = head.dataset.sort;
    sort();
    readout.textContent = `Sorted by ${byId("sort").selectedOptions[0].textContent}`;
  });
  body.addEventListener("keydown", onKey);
  body.addEventListener("focusout", (event) => event.target.classList.contains("passage") && document.querySelectorAll(".current").forEach((word) => word.classList.remove("current")));
  document.addEventListener("pointermove", onPointer, { signal });
  document.addEventListener("scroll", () => { tip.hidden = true; }, { capture: true, signal });
  byId("controls").addEventListener("submit", (event) => event.preventDefault());

  shade();
  byId("controls").hidden = false;
}

function startTheme() {
  const setTheme = (dark) => {
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    byId("theme").setAttribute("aria-pressed", String(dark));
  };
  byId("theme").addEventListener("click", () => setTheme(byId("theme").getAttribute("aria-pressed") !== "true"));
  setTheme(window.matchMedia("(prefers-color-scheme: dark)").matches);
}

startTheme();
if (byId("data")) startView();
