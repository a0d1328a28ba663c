// How a search orders its results: Sphinx's points, more for pages that solve a problem, fewer for history.
var Scorer = {
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
  score: ([page, , , , points]) => {
    if (/^docs\/(troubleshooting|glossary)$/.test(page)) return points + 20
    if (/^docs\/(how-to|tutorial)\//.test(page)) return points + 10
    return /CHANGELOG$|^docs\/decisions\//.test(page) ? points - 20 : points
  },
}
