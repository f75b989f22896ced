// The list of runs: which are shown, which are compared, and how it keeps up to date.
(() => {
  "use strict";
  const wanted = document.getElementById("wanted");
  const compare = document.getElementById("compare");
  const chosen = () => [...document.querySelectorAll("tbody input:checked")];

  function show() {
    const words = wanted.value.toLowerCase().split(/\s+/);
    const rows = [...document.querySelectorAll("tbody tr")];
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word)) && !row.querySelector("input:checked");
    }
    const shown = rows.filter((row) => !row.hidden).length;
    document.getElementById("count").textContent = shown < rows.length ? `${shown} of ${rows.length} runs` : "";
    compare.disabled = chosen().length < 2;
  }

  // What is chosen stays so; a row that has the focus is not taken away.
  async function refresh() {
    const status = document.getElementById("refreshed");
    let page;
    try {
      const answer = await fetch(location.href, { cache: "no-store" });
      if (!answer.ok) throw new Error(answer.statusText);
      page = new DOMParser().parseFromString(await answer.text(), "text/html");
    } catch {
      status.textContent = "The server no longer answers: this page shows the state above.";
      return;
    }
    status.textContent = "";
    const body = document.querySelector("tbody");
    if (body.contains(document.activeElement)) return;
    const names = new Set(chosen().map((box) => box.value));
    body.replaceWith(page.querySelector("tbody"));
    document.querySelector("thead").replaceWith(page.querySelector("thead"));
    document.getElementById("notes").replaceWith(page.getElementById("notes"));
    for (const box of document.querySelectorAll("tbody input")) box.checked = names.has(box.value);
    show();
  }

  wanted.addEventListener("input", show);
  document.addEventListener("change", show);
  show();
  const seconds = Number(document.body.dataset.refreshSeconds);
  setInterval(() => { if (!document.hidden) refresh(); }, seconds * 1000);
})();
