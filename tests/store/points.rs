//! Every failpoint of the source has a well-formed name that stands at one place.

use std::collections::BTreeMap;
use std::path::Path;

/// name → file, read out of the source: nobody keeps a list that can be forgotten.
pub fn failpoints() -> BTreeMap<String, Vec<String>> {
    fn walk(dir: &Path, found: &mut BTreeMap<String, Vec<String>>) {
        for entry in std::fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                walk(&path, found);
            } else if path.extension().is_some_and(|e| e == "rs") {
                let text = std::fs::read_to_string(&path).unwrap();
                for (_, rest) in text.match_indices("failpoint::hit(\"").map(|(at, m)| (at, &text[at + m.len()..])) {
                    let name = rest.split('"').next().unwrap().to_owned();
                    found.entry(name).or_default().push(path.display().to_string());
                }
            }
        }
    }
    let mut found = BTreeMap::new();
    walk(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut found);
    found
}

#[test]
fn failpoints_have_a_room_a_verb_and_a_step_and_one_place() {
    let points = failpoints();
    assert!(points.len() >= 8, "{points:?}");
    for (name, places) in &points {
        let parts: Vec<&str> = name.split('.').collect();
        let formed =
            |p: &&str| !p.is_empty() && p.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b"_-".contains(&b));
        assert!(parts.len() == 3 && parts.iter().all(formed), "{name} is not room.verb.step ({places:?})");
        assert_eq!(places.len(), 1, "{name} stands at several places: {places:?}");
        assert!(
            places[0].contains(&format!("/src/{}", parts[0])) || places[0].contains(&format!("/{}/", parts[0])),
            "{name} is in {places:?}"
        );
    }
}
