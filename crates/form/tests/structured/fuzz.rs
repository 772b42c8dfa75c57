//! Forms that somebody changed at random, compiled where no process of their own bounds them.

#[path = "../../../../fuzz/src/form.rs"]
#[expect(unreachable_pub, reason = "targets of fuzz/ include it, too")]
mod form;
#[path = "../../../../fuzz/src/mutate.rs"]
#[expect(unreachable_pub, reason = "targets of fuzz/ include it, too")]
mod mutate;

const WORDS: &[&[u8]] = &[
    b"\"allOf\":[",
    b"\"anyOf\":[",
    b"{\"$ref\":\"#\"}",
    b"\"$defs\":{",
    b"\"type\":\"string\",",
    b"\"type\":\"object\",",
    b"true",
    b"false",
    b"null",
    b"-1",
    b"0",
    b"1e308",
    b"100000",
    b"4294967296",
    b"18446744073709551615",
    b"0.1",
    b"\"pattern\":\"^(.*a.*)*b$\",",
    b"\"pattern\":\"(?=a)\",",
    b"\"format\":\"email\",",
    b"\"minItems\":9,",
    b"\"maxItems\":0,",
    b"\"maxLength\":100000,",
    b"\"additionalProperties\":true,",
    b"\"required\":[\"a\",\"z\"],",
    b"\"not\":{},",
    b"\"enum\":[],",
    b"\"multipleOf\":1e-300,",
    b"&",
    b"~",
    b"|",
    b"*",
    b"+",
    b"?",
    b"{2,999}",
    b"{,5}",
    b"(.*",
    b")*",
    b"[^\\x00-\\xff]",
    b"\\p{Cs}",
    b"(?i)",
    b"(?<=a)",
    b"\\b",
    b"\\Z",
    b"\n",
    b"start: ",
    b"start",
    b"%json {",
    b"%ignore",
    b"%lark {",
    b"[capture]",
    b"[lazy]",
    b"[max_tokens=3]",
    b"[stop=\"x\"]",
    b"<[0]>",
    b"<x>",
    b"\"\"",
    b"//",
    b"/a*/",
    b"\xc3\xa9",
    b"\\u0000",
    b"\"\\ud800\"",
];

#[test]
fn changed_forms_are_compiled_or_refused_in_good_time() {
    let grammars = form::grammars();
    let seeds = mutate::seeds("form");
    for seed in &seeds {
        assert!(form::form(&grammars, seed), "{}", String::from_utf8_lossy(seed));
    }
    mutate::cases("forms", 1500, |mut random| {
        form::form(&grammars, &mutate::changed(&mut random, &seeds, WORDS))
    });
}
