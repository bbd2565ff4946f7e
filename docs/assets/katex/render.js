// Typesets what pymdownx.arithmatex marks as a formula. It runs once a page; everything it needs lies beside it.
document.querySelectorAll(".arithmatex").forEach((element) => {
  const source = element.textContent;
  const formula = source.replace(/^\\[([]|\\[)\]]$/g, "");
  katex.render(formula, element, { displayMode: source.startsWith("\\["), throwOnError: false });
});
