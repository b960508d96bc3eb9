"use strict";

// Text from the server goes into the page as text (textContent), never as markup.

const byId = (id) => document.getElementById(id);
const form = byId("form"), textarea = byId("text"), results = byId("results");

function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function show(place, sentence) {
  place.textContent = sentence;
  place.hidden = !sentence;
}

/** Ask the server; an Error's message is a sentence for the user. */
async function ask(path, body, signal) {
  let response, answer;
  try {
    const post = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
    response = await fetch(path, { ...(body ? post : {}), signal });
    answer = await response.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error(response ? `The server answered with status ${response.status} and no reason.`
      : "The server cannot be reached: is it still running?");
  }
  if (!response.ok) throw new Error(asSentence(answer.error));
  return answer;
}

const asSentence = (text) => text.charAt(0).toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");

/** A piece as a reader knows it: a word that begins shows its space as distance. */
const visible = (piece) => piece.replace(/^▁/, "") || "␣";
const isSpecial = (piece, place, count) => (piece === "</s>" && place === count - 1) || (piece === "<s>" && place === 0);

/** Colour by the root of the weight: a head that looks at ten words is seen, too. */
const shade = (place, weight) => place.style.setProperty("--shade", Math.sqrt(weight).toFixed(3));

/** One model's answer. */
class Result {
  constructor(answer, index, text) {
    this.answer = answer;
    this.index = index;
    this.text = text;
    this.chosen = 0;
    this.row = 0;
    this.maps = new Map();
    this.section = byId("result").content.cloneNode(true).firstElementChild;
    const find = (name) => this.section.querySelector(`.${name}`);
    this.kind = find("kind");
    this.layer = find("layer");
    this.head = find("head");
    this.lookers = find("lookers");
    this.targets = find("targets");
    this.table = find("map");
    this.readout = find("readout");
    this.problem = find("attention-error");
    find("name").textContent = answer.name;
    find("languages").textContent = languages(answer);
    this.listHypotheses(find("hypotheses"));
    this.explain(find("note"));
    find("attention").hidden = !answer.has_maps;
    if (!answer.has_maps) return;
    find("scroll").setAttribute("aria-label", `Heat map of the attention weights of ${answer.name}`);
    this.lookers.setAttribute("aria-label", "Words that look");
    this.listHeads();
    this.listLayers();
    this.kind.addEventListener("change", () => { this.row = 0; this.listLayers(); this.load(); });
    this.layer.addEventListener("change", () => this.load());
    this.head.addEventListener("change", () => this.draw());
    this.lookers.addEventListener("keydown", (event) => this.moveByKey(event));
    this.load();
  }

  explain(place) {
    const { split, has_maps: hasMaps, synthetic, beyond_training: beyondTraining } = this.answer;
    const { whole_for_prefix: wholeForPrefix, missing_spans: missingSpans, hypotheses } = this.answer;
    const notes = [];
    if (synthetic) notes.push("Trained on synthetic text: it knows the words of its grammar only.");
    if (split) {
      const why = split.limit ? `more than ${split.limit} word pieces` : "several sentences";
      notes.push(`The text has ${why}: its ${split.parts} parts were translated one by one, and attention is not ` +
        "shown.");
    } else if (!hasMaps) {
      notes.push(`Attention is shown for up to ${limits.longest_map} word pieces, and this sentence is longer.`);
    }
    if (beyondTraining) notes.push("A sentence is longer than any in the training: check its translation.");
    if (wholeForPrefix) notes.push("The beginning has several sentences: check that no sentence is missing.");
    if (missingSpans) notes.push("Protected text has no place in the translation: look for it at the end, or add it.");
    if (hypotheses.some((hypothesis) => hypothesis.cut)) {
      notes.push("A translation reached the maximum length and was cut.");
    }
    show(place, notes.join(" "));
  }

  listHypotheses(fieldset) {
    this.answer.hypotheses.forEach((hypothesis, place) => {
      const label = element("label", "hypothesis");
      const radio = element("input");
      Object.assign(radio, { type: "radio", name: `hypothesis-${this.index}`, checked: place === 0 });
      radio.addEventListener("change", () => { this.chosen = place; this.row = 0; this.load(); });
      const text = element("span", hypothesis.text ? "text" : "text nothing", hypothesis.text || "empty");
      if (hypothesis.text) Object.assign(text, { dir: "auto", lang: this.answer.target_language });
      label.append(radio, text, element("span", "score", hypothesis.score.toFixed(3)));
      fieldset.append(label);
    });
  }

  listHeads() {
    this.head.append(new Option("Mean of all", "mean"));
    for (let head = 0; head < this.answer.heads; head++) this.head.append(new Option(String(head + 1), String(head)));
  }

  listLayers() {
    const count = this.answer.layers[this.kind.value];
    const options = Array.from({ length: count }, (_, layer) => new Option(String(layer + 1), String(layer)));
    // Start with the last layer, which decides the output.
    options[count - 1].selected = true;
    this.layer.replaceChildren(...options);
  }

  /** Get the chosen layer's maps, from the server unless they were here before. */
  async load() {
    this.loading?.abort();
    this.loading = new AbortController();
    const kind = this.kind.value, layer = Number(this.layer.value);
    // The encoder does not depend on the translation.
    const key = [kind, layer, kind === "encoder" ? "" : this.chosen].join();
    show(this.problem, "");
    try {
      if (!this.maps.has(key)) {
        const tokens = this.answer.hypotheses[this.chosen].tokens;
        const body = { model: this.index, text: this.text, tokens, kind, layer };
        this.maps.set(key, await ask("api/attention", body, this.loading.signal));
      }
      this.map = this.maps.get(key);
      this.draw();
    } catch (error) {
      if (error.name !== "AbortError") show(this.problem, error.message);
    }
  }

  draw() {
    const { rows, columns, weights } = this.map;
    const head = this.head.value;
    const mean = (row, column) => weights.reduce((sum, map) => sum + map[row][column], 0) / weights.length;
    this.weights = head === "mean" ? rows.map((_, row) => columns.map((_, column) => mean(row, column)))
      : weights[Number(head)];
    this.row = Math.min(this.row, rows.length - 1);
    const kind = this.kind.value;
    const rowLanguage = kind === "encoder" ? this.answer.source_language : this.answer.target_language;
    const columnLanguage = kind === "decoder" ? this.answer.target_language : this.answer.source_language;
    this.lookers.lang = rowLanguage;
    this.targets.lang = columnLanguage;
    this.drawWords(rows, columns);
    this.drawTable(rows, columns, rowLanguage, columnLanguage);
    this.choose(this.row);
  }

  drawWords(rows, columns) {
    const words = (pieces, make) => pieces.map((piece, place) => {
      const word = make(place);
      word.textContent = visible(piece);
      word.classList.toggle("begins", piece.startsWith("▁"));
      if (isSpecial(piece, place, pieces.length)) {
        word.classList.add("special");
        // Otherwise its signs would be mirrored among Arabic words.
        word.dir = "ltr";
      }
      return word;
    });
    this.lookers.replaceChildren(...words(rows, (row) => {
      const button = element("button");
      button.type = "button";
      button.addEventListener("mouseenter", () => this.choose(row));
      button.addEventListener("focus", () => this.choose(row));
      button.addEventListener("click", () => this.choose(row));
      return button;
    }));
    this.targets.replaceChildren(...words(columns, () => element("span")));
  }

  drawTable(rows, columns, rowLanguage, columnLanguage) {
    const top = element("tr");
    top.append(element("td"), ...columns.map((piece) => {
      const cell = element("th"), text = element("span", "", visible(piece));
      Object.assign(cell, { scope: "col", title: visible(piece), dir: "auto", lang: columnLanguage });
      cell.append(text);
      return cell;
    }));
    const lines = rows.map((piece, row) => {
      const line = element("tr"), name = element("th", "", visible(piece));
      Object.assign(name, { scope: "row", title: visible(piece), dir: "auto", lang: rowLanguage });
      line.append(name, ...this.weights[row].map((weight, column) => {
        const cell = element("td");
        shade(cell, weight);
        cell.title = `${visible(piece)} → ${visible(columns[column])}: ${weight.toFixed(3)}`;
        return cell;
      }));
      line.addEventListener("mouseenter", () => this.choose(row));
      line.addEventListener("click", () => this.choose(row));
      return line;
    });
    const head = element("thead"), body = element("tbody");
    head.append(top);
    body.append(...lines);
    this.table.style.setProperty("--size", `${columns.length <= 14 ? 32 : columns.length <= 28 ? 24 : 18}px`);
    this.table.replaceChildren(head, body);
  }

  /** Mark a row, and its weights on the words that it looks at. */
  choose(row) {
    this.row = row;
    [...this.lookers.children].forEach((word, place) => {
      word.classList.toggle("chosen", place === row);
      word.tabIndex = place === row ? 0 : -1;
      word.setAttribute("aria-pressed", String(place === row));
    });
    [...this.targets.children].forEach((word, column) => {
      shade(word, this.weights[row][column]);
      word.title = this.weights[row][column].toFixed(3);
    });
    [...this.table.tBodies[0].rows].forEach((line, place) => line.classList.toggle("chosen", place === row));
    const most = this.weights[row].map((weight, column) => [weight, column]).sort(([a], [b]) => b - a).slice(0, 4)
      .filter(([weight]) => weight >= 0.005);
    const parts = most.flatMap(([weight, column], place) =>
      [place ? ", " : " looks at ", element("bdi", "", visible(this.map.columns[column])), ` ${weight.toFixed(2)}`]);
    const word = element("b");
    word.append(element("bdi", "", visible(this.map.rows[row])));
    this.readout.replaceChildren(word, ...parts);
  }

  /** Arrow keys go from word to word as the eye sees them. */
  moveByKey(event) {
    const forward = getComputedStyle(this.lookers).direction === "rtl" ? "ArrowLeft" : "ArrowRight";
    const last = this.lookers.children.length - 1;
    const places = { ArrowLeft: this.row - 1, ArrowRight: this.row - 1, Home: 0, End: last, [forward]: this.row + 1 };
    if (!(event.key in places)) return;
    event.preventDefault();
    this.lookers.children[Math.max(0, Math.min(last, places[event.key]))].focus();
  }
}

const languages = (model) => `${model.source_language} → ${model.target_language}`;
let limits = { max_characters: Infinity, longest_map: 0 };
let running;

async function translate() {
  const text = textarea.value;
  running?.abort();
  const mine = running = new AbortController();
  show(byId("error"), "");
  byId("status").textContent = "Translating …";
  results.classList.add("old");
  try {
    const answer = await ask("api/translate", { text }, mine.signal);
    results.replaceChildren(...answer.results.map((one, index) => new Result(one, index, text).section));
    byId("status").textContent = "";
  } catch (error) {
    if (error.name === "AbortError") return;
    byId("status").textContent = "";
    results.replaceChildren();
    show(byId("error"), error.message);
  }
  results.classList.remove("old");
}

function countCharacters() {
  // Count code points, as Python does.
  const count = [...textarea.value].length, rest = limits.max_characters - count;
  byId("count").textContent = rest < 0.1 * limits.max_characters
    ? ` · ${count.toLocaleString("en")} of ${limits.max_characters.toLocaleString("en")} characters` : "";
}

async function begin() {
  form.addEventListener("submit", (event) => { event.preventDefault(); translate(); });
  textarea.addEventListener("keydown", (event) => {
    // In an input method, Enter also ends a word.
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
  textarea.addEventListener("input", countCharacters);
  try {
    limits = await ask("api/models");
    byId("about").textContent = limits.models.map((model) => `${model.name} (${languages(model)})`).join(" · ");
    const sources = new Set(limits.models.map((model) => model.source_language));
    if (sources.size === 1) textarea.lang = [...sources][0];
  } catch (error) {
    show(byId("error"), error.message);
  }
}

begin();
