// Prints what the parser of AsyncAPI finds wrong in the document on stdin, as JSON.
const { Parser } = require("@asyncapi/parser");
const document = require("fs").readFileSync(0, "utf8");

new Parser().parse(document).then(({ document: parsed, diagnostics }) => {
    const wrong = diagnostics.filter(({ severity }) => severity === 0); // an error
    console.log(JSON.stringify({
        wrong: wrong.map(({ message, path }) => `${path.join(".")}: ${message}`),
        operations: parsed ? parsed.operations().all().map((each) => each.id()) : [],
    }));
});
