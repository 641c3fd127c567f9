"use strict";
// Everything from outside is put into the page as textContent; the one piece of HTML is the viewer's, which the server has escaped.
(() => {
  const EXAMPLE = {
    query: "how long does a flea live",
    documents: [
      "Fleas lay their eggs on the fur of a host; the eggs fall off and hatch where the animal sleeps.",
      "An adult cat flea lives for two to three months with a host, and only one to two weeks without one.",
      "A poured concrete floor costs between six and ten dollars per square foot.",
      "Rosin gives the hair of the bow its grip on the string.",
    ],
  };
  let running = new AbortController();

  class Refused extends Error {
    constructor(message, status = 0) {
      super(message);
      this.status = status;
    }
  }

  async function ask(path, body, signal) {
    const headers = {};
    if (byId("key").value) headers.Authorization = `Bearer ${byId("key").value.trim()}`;
    if (body !== undefined) headers["Content-Type"] = "application/json";
    const options = body === undefined ? { headers, signal } : { method: "POST", headers, signal, body: JSON.stringify(body) };
    let response;
    try {
      response = await fetch(path, options);
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Refused("The server does not answer; is it still running?");
    }
    const answer = await response.json().catch(() => null);
    if (response.status === 401) askForKey();
    if (!response.ok || answer === null) throw new Refused(wordsOf(response, answer), response.status);
    return { answer, headers: response.headers };
  }

  function wordsOf(response, answer) {
    const words = answer && typeof answer.message === "string" ? answer.message : `the server answered ${response.status}`;
    const wait = response.headers.get("Retry-After");
    return wait ? `${words} (try again in ${wait} s)` : words;
  }

  function askForKey() {
    byId("key").hidden = byId("key-label").hidden = false;
    byId("key").focus();
  }

  function show(problem) {
    byId("problem").hidden = !problem;
    byId("problem").textContent = problem || "";
    if (problem) byId("status").textContent = "";
  }

  // ---- passages: plain text, or JSON where it begins like JSON
  function documentsIn(text) {
    const trimmed = text.trim();
    if (trimmed.startsWith("[")) return checked(parsed(trimmed, "the passages"));
    if (trimmed.startsWith("{")) {
      const lines = trimmed.split(/\n/).map((line, index) => [line.trim(), index + 1]).filter(([line]) => line);
      return checked(lines.map(([line, number]) => parsed(line, `line ${number} of the passages`)));
    }
    const between = /\n\s*\n/.test(trimmed) ? /\n\s*\n/ : /\n/;
    return trimmed.split(between).map((piece) => piece.trim()).filter(Boolean);
  }

  function parsed(text, place) {
    try {
      return JSON.parse(text);
    } catch (error) {
      throw new Refused(`${place}: not JSON (${error.message})`);
    }
  }

  function checked(documents) {
    const isText = (value) => typeof value === "string" || (value !== null && typeof value === "object" && typeof value.text === "string");
    const wrong = Array.isArray(documents) ? documents.findIndex((document) => !isText(document)) : 0;
    if (wrong >= 0) throw new Refused(`passage ${wrong + 1}: give a string, or an object with "text" (and "title")`);
    return documents;
  }

  // what a search engine would send: ids and grades are for this page only
  function plain(document) {
    if (typeof document === "string") return document;
    return document.title ? { title: document.title, text: document.text } : document.text;
  }

  // ---- the request, as somebody would type it
  const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

  function commandOf(body) {
    const key = byId("key").value ? ' -H "Authorization: Bearer $HEADRANK_API_KEY"' : "";
    return `curl ${quoted(`${location.origin}/v2/rerank`)} -H 'Content-Type: application/json'${key} -d ${quoted(JSON.stringify(body))}`;
  }

  function showTiming(headers, seconds, tokens) {
    const rows = [["round trip", `${Math.round(1000 * seconds)} ms`]];
    for (const [name, header] of [["queue", "x-queue-time"], ["tokenising", "x-tokenization-time"], ["model", "x-inference-time"], ["server in all", "x-total-time"]]) {
      if (headers.get(header) !== null) rows.push([name, `${headers.get(header)} ms`]);
    }
    rows.push(["tokens read", tokens]);
    byId("timing").replaceChildren(...rows.map(([name, value]) => {
      const row = document.createElement("div");
      const term = document.createElement("dt");
      const shown = document.createElement("dd");
      term.textContent = name;
      shown.textContent = value;
      row.append(term, shown);
      return row;
    }));
  }

  function showView(view, results, signal) {
    const parsedPage = new DOMParser().parseFromString(view.fragment, "text/html");
    byId("view").replaceChildren(...[...parsedPage.body.childNodes].map((node) => document.adoptNode(node)));
    const byIndex = new Map(results.map((result) => [result.index, result]));
    byId("view").querySelectorAll("tbody tr").forEach((row, place) => {
      const result = byIndex.get(view.order[place]);
      const score = document.createElement("span");
      score.className = "score";
      score.textContent = ` · score ${result.relevance_score.toPrecision(4)}${
        result.raw_score === undefined ? "" : ` (raw ${result.raw_score.toPrecision(4)})`}${
        result.is_truncated ? " · cut" : ""}${result.chunk ? ` · best part, characters ${result.chunk.start} to ${result.chunk.end}` : ""}`;
      row.querySelector(".docid").append(score);
    });
    startView(signal);
  }

  async function rank(event) {
    if (event) event.preventDefault();
    running.abort();
    const current = running = new AbortController();
    show("");
    byId("rank").setAttribute("aria-disabled", "true");
    try {
      const documents = documentsIn(byId("documents").value);
      const query = byId("query").value;
      if (!query.trim()) throw new Refused("The query is empty.");
      if (!documents.length) throw new Refused("There is no passage.");
      byId("status").textContent = `Ranking ${documents.length} passages …`;
      const body = { query, documents: documents.map(plain) };
      const started = performance.now();
      const { answer, headers } = await ask("/v2/rerank", body, current.signal);
      const seconds = (performance.now() - started) / 1000;
      byId("curl").textContent = commandOf(body);
      showTiming(headers, seconds, answer.meta.tokens.input_tokens);
      byId("status").textContent = "Ranked; reading where the scores came from …";
      const { answer: view } = await ask("/playground/view", { query, documents: documents.map(shown) }, current.signal);
      showView(view, answer.results, current.signal);
      byId("result").hidden = false;
      byId("status").textContent = `${documents.length} passages ranked.`;
    } catch (error) {
      if (error.name === "AbortError") return;
      if (!(error instanceof Refused)) throw error;
      byId("result").hidden = true;  // an older ranking would look like the answer
      show(error.message);
    } finally {
      if (current === running) byId("rank").removeAttribute("aria-disabled");
    }
  }

  // the endpoint is strict about types: what is no id and no grade is not sent
  function shown(document) {
    if (typeof document === "string") return document;
    const kept = { text: document.text };
    if (typeof document.title === "string") kept.title = document.title;
    if (document.id !== undefined && document.id !== null) kept.id = String(document.id);
    if (Number.isInteger(document.grade) && Math.abs(document.grade) <= 100) kept.grade = document.grade;
    return kept;
  }

  // ---- collections
  function optionsOf(rows) {
    return rows.map(([value, text]) => {
      const option = document.createElement("option");
      option.value = value;
      option.textContent = text;
      return option;
    });
  }

  let listing = new AbortController();

  async function listQueries() {
    listing.abort();  // of two answers the one to the last letter typed counts, whichever comes first
    listing = new AbortController();
    const parameters = new URLSearchParams({ collection: byId("collection").value, contains: byId("contains").value });
    const { answer } = await ask(`/playground/queries?${parameters}`, undefined, listing.signal);
    const first = answer.length ? "choose a query" : "no query has these words";
    byId("offered").replaceChildren(...optionsOf([["", first], ...answer.map((row) => [row.id, row.query])]));
  }

  async function pick() {
    if (!byId("offered").value) return;
    const parameters = new URLSearchParams({ collection: byId("collection").value, query: byId("offered").value });
    const { answer } = await ask(`/playground/candidates?${parameters}`);
    byId("query").value = answer.query;
    byId("documents").value = answer.documents.map((row) => JSON.stringify(row)).join("\n");
    byId("status").textContent = `${answer.documents.length} passages picked.`;
  }

  async function greet() {
    const { answer } = await ask("/info");
    const kind = answer.is_score_relative_to_its_list ? "scores are relative to their list" : "a score depends on query and passage alone";
    byId("model").textContent = `${answer.model_id}: ${answer.heads} heads in ${answer.layers.used} of ${answer.layers.of} layers, ${answer.layout} layout, on ${answer.device}; ${kind}.`;
    const { answer: collections } = await ask("/playground/collections");
    byId("picker").hidden = collections.length === 0;
    if (collections.length) {
      byId("collection").replaceChildren(...optionsOf(collections.map((row) => [row.name, `${row.name} (${row.queries} queries)`])));
      await listQueries();
    }
    document.body.dataset.state = "ready";
  }

  const guarded = (work) => async () => {
    show("");
    try {
      await work();
    } catch (error) {
      if (error.name === "AbortError") return;
      if (!(error instanceof Refused)) throw error;
      show(error.message);
    }
  };

  async function greetWhenReady() {
    for (;;) {
      try {
        await greet();
        return;
      } catch (error) {
        if (error.status !== 503) throw error;
        byId("model").textContent = error.message;
        await new Promise((resolve) => setTimeout(resolve, 1000));
      }
    }
  }

  byId("request").addEventListener("submit", rank);
  byId("request").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) rank(event);
  });
  byId("example").addEventListener("click", () => {
    byId("query").value = EXAMPLE.query;
    byId("documents").value = EXAMPLE.documents.join("\n\n");
    rank();
  });
  byId("collection").addEventListener("change", guarded(listQueries));
  byId("contains").addEventListener("input", guarded(listQueries));
  byId("offered").addEventListener("change", guarded(pick));
  byId("key").addEventListener("change", guarded(greetWhenReady));
  byId("copy").addEventListener("click", async () => {
    await navigator.clipboard.writeText(byId("curl").textContent);
    byId("status").textContent = "Copied.";
  });
  guarded(greetWhenReady)();
})();
